"""What pt2qa uses of torch and torchao without a stability promise; nothing else in pt2qa touches it.

For each name: what pt2qa needs it for, for lack of a public interface.  ``tests/graph/test_internals.py`` has
a test of each, whose name says what broke.  There are no fallbacks: if a name is gone, Python's error names it.
"""

import warnings

from pt2qa._graph.internals.releases import untested

if text := untested():
    warnings.warn(text, stacklevel=2)
