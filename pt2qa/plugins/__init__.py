"""Quantizer plug-ins: what a plug-in is, how it is found, and how it checks its options.

Apart from :mod:`pt2qa.errors`, this is all of pt2qa that a plug-in may import. Functions here import torch only when
they need it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
