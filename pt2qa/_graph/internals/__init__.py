"""What pt2qa uses of torch and torchao that they do not promise to keep; nothing else in pt2qa reaches for it.

For each name: what pt2qa needs it for, where their public interface has nothing.  ``tests/graph/test_internals.py`` has
a test of each, whose name says what broke.  Nothing falls back: where a name is gone, Python's error names it.
"""
