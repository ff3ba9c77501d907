"""Layer by layer and weight by weight: the reports of a comparison."""
