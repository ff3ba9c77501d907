"""A report's numbers on the model's graph: for Model Explorer, and as a drawing of what stands around one op."""

from pt2qa.overlays.model_explorer import write_overlay
from pt2qa.overlays.neighbourhood import write_neighbourhood

__all__ = ["write_neighbourhood", "write_overlay"]
