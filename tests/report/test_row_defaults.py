"""What a row has where its file or its maker gives nothing: a value that no measurement has."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from typing import Any

import pt2qa
from pt2qa._layers.sums import Compared
from pt2qa._report.rows import Row

LACKING = {int: (-1, 0), float: (0.0,), str: ("", "unknown"), bool: (False,), tuple: ((),)}
"""A number is -1, of counts and sums 0, and of measurements nan."""


def row_kinds(of: type[Row] = Row) -> list[type[Row]]:
    return [of, *(kind for each in of.__subclasses__() for kind in row_kinds(each))]


def test_a_field_that_is_not_given_says_that_nothing_is_known() -> None:
    for found in pkgutil.walk_packages(pt2qa.__path__, "pt2qa."):
        if found.name.endswith(("rows", "report")):
            importlib.import_module(found.name)
    given: dict[str, Any] = {
        f"{kind.__name__}.{each.name}": each.default
        for kind in (*row_kinds(), Compared)
        if dataclasses.is_dataclass(kind)
        for each in dataclasses.fields(kind)
        if each.default is not dataclasses.MISSING and each.name not in ("table", "observed_at")
    }
    wrong = {
        name: value
        for name, value in given.items()
        if value is not None and not (value != value or value in LACKING[type(value)])
    }
    assert wrong == {}
    assert math.isnan(given["LayerRow.input_sqnr"])
    assert given["CaseRow.first_wrong"] == given["LayerRow.step"] == -1
