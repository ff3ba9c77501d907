"""Benchmarks: ratios within one run, held against the bars of ``docs/design.md``."""
