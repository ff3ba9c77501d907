"""What makes these tests fast: most of the time of XNNPACK's quantizer goes into exporting the same patterns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pt2qa._conformance.pattern_exports import patterns_exported_once


@pytest.fixture(autouse=True, scope="session")
def _export_each_pattern_once() -> Iterator[None]:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer_utils as annotators

    export = annotators._get_aten_graph_module_for_pattern

    def once(*args: Any, **kwargs: Any) -> Any:
        with patterns_exported_once():
            return export(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(annotators, "_get_aten_graph_module_for_pattern", once)
        yield
