"""For authors of quantizers: checks whether a quantizer behaves; ``testing.pyi`` lists the names.

:func:`check_quantizer` checks a set of properties on small models, each with one pattern, and returns a report;
:class:`QuantizerConformance` does the same as a pytest class.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("pt2qa", __file__)
