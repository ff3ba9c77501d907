"""What came out for quantizers that others wrote: a table for each in ``tables/``, models by properties.

Below a table stands what each failure comes from; where in the quantizer's source is in docs/test_your_quantizer.md.
``python -m tests.conformance.outcomes NAME ...`` writes tables anew and shows what changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pt2qa.testing import MODELS, PROPERTIES, check_quantizer
from tests.overrides.strangers import cadence, coreml, samsung

TABLES = Path(__file__).parent / "tables"
Outcomes = dict[tuple[str, str], tuple[str, str]]
"""By model and property: the outcome, and of a failure the reason."""


@dataclass(frozen=True)
class Checked:
    """A quantizer that is checked.

    Attributes:
        make: what :func:`pt2qa.testing.check_quantizer` takes.
        qat: ditto.
        models: those that the table has.
        properties: ditto.
    """

    make: Any
    qat: bool = False
    models: tuple[str, ...] = tuple(MODELS)
    properties: tuple[str, ...] = tuple(PROPERTIES)

    def run(self, models: Iterable[str]) -> Outcomes:
        """The outcomes on some models."""
        report = check_quantizer(self.make, qat=self.qat, models=models, properties=self.properties, progress=False)
        return {(row.model, row.property): (row.outcome, row.why * (row.outcome == "failed")) for row in report.rows}


def arm() -> Any:
    from torchao.quantization.pt2e.quantizer import arm_inductor_quantizer

    config = arm_inductor_quantizer.get_default_arm_inductor_quantization_config()
    return arm_inductor_quantizer.ArmInductorQuantizer().set_global(config)


def vulkan() -> Any:
    from executorch.backends.vulkan.quantizer import vulkan_quantizer

    config = vulkan_quantizer.get_symmetric_quantization_config(is_dynamic=False)
    return vulkan_quantizer.VulkanQuantizer().set_global(config)


OURS = {"x86": Checked("x86"), "xnnpack": Checked("xnnpack")}
STRANGERS = {
    "arm_inductor": Checked(arm),
    "vulkan": Checked(vulkan),
    "cadence": Checked(cadence),
    "samsung": Checked(samsung),
    # It annotates for seconds, so properties that annotate many times are left out.
    "coreml": Checked(
        coreml,
        qat=True,
        models=(
            *("conv_bn_relu", "conv_relu6", "conv1d", "linear", "sigmoid", "residual_add", "cat", "mul", "add_self"),
            *("two_users", "shared_relu", "shared_conv", "tied_weights", "max_pool", "avg_pool", "attention"),
            *("multihead_attention", "lstm", "embedding", "integers", "buffer", "literal"),
        ),
        properties=(
            *("prepare", "calibrated", "convert", "simulator", "pairing", "shared_specs", "float_tensors", "sqnr"),
        ),
    ),
}
CHECKED = {**OURS, **STRANGERS}

SOME_MODELS = (
    *("conv_bn_relu", "conv_relu6", "linear", "residual_add", "add_self", "cat", "shared_conv", "avg_pool"),
    *("sigmoid", "multihead_attention", "lstm_decomposed"),
)
"""They show every fault that was found in a stranger, and each kind of op that is annotated in a way of its own."""


CELL = {"passed": "passed", "failed": "FAILED", "does not apply": "-", "skipped": "skipped"}
"""How an outcome is written in a table."""


def written(outcomes: Outcomes) -> str:
    """Outcomes as a table, and below it the reasons of failures: ``spelling on mul: ...``, ``strict: ...`` for all."""
    models, properties = (list(dict.fromkeys(key[part] for key in outcomes)) for part in (0, 1))
    widths = [max(map(len, models)), *(max(len(name), len("skipped")) for name in properties)]
    rows = [["", *properties], *([model, *(CELL[outcomes[model, name][0]] for name in properties)] for model in models)]
    reasons: dict[str, dict[str, list[str]]] = {}
    for (model, name), (outcome, why) in outcomes.items():
        if outcome == "failed":
            reasons.setdefault(name, {}).setdefault(why, []).append(model)
    lines = [
        f"{name} on {', '.join(models)}: {why}" if len(groups) > 1 else f"{name}: {why}"
        for name, groups in reasons.items()
        for why, models in groups.items()
    ]
    return "\n".join([*("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), "", *lines]).rstrip() + "\n"


def read(name: str) -> Outcomes:
    """The outcomes in a quantizer's table."""
    table, _, reasons = (TABLES / f"{name}.txt").read_text().partition("\n\n")
    header, *rows = (line.split() for line in table.splitlines())
    outcome_of = {cell: outcome for outcome, cell in CELL.items()}
    found = {
        (model, each): (outcome_of[cell], "")
        for model, *cells in rows
        for each, cell in zip(header, cells, strict=True)
    }
    for line in reasons.splitlines():
        where, _, why = line.partition(": ")
        each, _, models = where.partition(" on ")
        chosen = models.split(", ") if models else [model for model, *_ in rows]
        for model in chosen:
            if found[model, each][0] == "failed":
                found[model, each] = ("failed", why)
    return found


def differences(expected: Outcomes, found: Outcomes) -> list[str]:
    """Each outcome that is another one: property, model, and why."""
    keys = dict.fromkeys((*expected, *found))
    pairs = [(key, found.get(key, ("not looked at", "")), expected.get(key, ("nothing", ""))) for key in keys]
    return [
        f"{each} on {model}: {': '.join(filter(None, now))}; the table says {': '.join(filter(None, before))}"
        for (model, each), now, before in pairs
        if now[0] != before[0]
    ]


def main(names: list[str]) -> None:
    """Writes tables anew; failures that are in the old table keep their reason."""
    for name in names or CHECKED:
        found, file = CHECKED[name].run(CHECKED[name].models), TABLES / f"{name}.txt"
        before = read(name) if file.exists() else {}
        print("\n".join([f"{name}:", *differences(before, found)]))
        kept = {key: before[key] for key in found if before.get(key, ("",))[0] == found[key][0]}
        file.write_text(written({**found, **kept}))


if __name__ == "__main__":
    main(sys.argv[1:])
