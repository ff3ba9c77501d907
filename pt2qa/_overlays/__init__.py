"""A report's numbers on the model's graph: for Model Explorer, and as a drawing of the ops around one op."""
