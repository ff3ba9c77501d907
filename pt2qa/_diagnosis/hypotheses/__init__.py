"""Hypotheses: one module for each kind of evidence, each with a function from a case to the causes it suggests."""
