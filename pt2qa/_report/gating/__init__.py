"""Whether a report meets requirements and keeps near a baseline."""
