"""Reports: what an analysis found, as frozen facts that can be printed, saved and loaded.  Free of torch.

Each kind of report is defined next to its analysis, such as ``pt2qa._layers.report``.  What all kinds share is in
``pt2qa._report``: files, columns, tables, formats.  The public names stand in ``report.pyi``, which type checkers read.
"""

from __future__ import annotations

import os

import lazy_loader

from pt2qa._report.base import Report
from pt2qa._report.storage import read

_imported, _, _names = lazy_loader.attach_stub("pt2qa", __file__)
# All at once: to be loaded, a kind of report must be registered, which its module does.
globals().update({name: _imported(name) for name in _names})
__all__ = [*_names, "load"]


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report of whatever kind the file holds.

    Args:
        path: a file that ``report.save`` or a command wrote.

    Returns:
        The report, of the class that was saved.

    Raises:
        ReportError: there is no such file, it is not a report, it is damaged, or a newer pt2qa wrote it.  The text
            names the file and the field.

    >>> load("no-such-report.safetensors")
    Traceback (most recent call last):
    pt2qa.errors.ReportError: no-such-report.safetensors: no such file; give a file that report.save() wrote
    """
    report: Report = read(path)
    return report
