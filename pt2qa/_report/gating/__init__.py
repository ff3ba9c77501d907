"""Whether a report meets requirements and stays close to a baseline."""
