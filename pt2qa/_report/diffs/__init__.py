"""What changed between two reports of one kind."""
