"""The profiler: what every op of a graph reads and makes."""
