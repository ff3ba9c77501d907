"""The profiler: what every op of a graph reads and makes."""

from pt2qa.profiling.analysis import Profiler, profile

__all__ = ["Profiler", "profile"]
