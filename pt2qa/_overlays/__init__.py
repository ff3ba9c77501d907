"""A report's numbers on the model's graph: for Model Explorer, and as a drawing of what stands around one op."""
