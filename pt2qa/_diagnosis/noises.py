"""The output noise of each site with other roundings, each measured in a run of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pt2qa._diagnosis.played import with_parameters
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import noise_sums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.batches import Batch, read_batches
from pt2qa._simulator.program import Site
from pt2qa._simulator.simulator import Simulator


@dataclass(frozen=True)
class Variant:
    """A rounding of a site: of an activation's value, or of a constant's float value."""

    end: Callable[[Tensor], Any]


@dataclass
class SiteNoises:
    """Squared output errors by site and name of the variant; ``signal`` is the sum of the squared outputs."""

    noise: dict[tuple[int, str], float] = field(default_factory=dict)
    signal: float = 0.0


def site_noises(
    pair: QuantizedPair,
    batches: Iterable[Any],
    variants: Callable[[Site], Mapping[str, Variant]],
    *,
    inputs_of: Callable[[Any], Batch] | None = None,
    progress: bool | None = None,
) -> SiteNoises:
    """Measures each variant of each site alone."""
    found = SiteNoises()
    for batch in read_batches(batches, inputs_of):
        values = pair.values(batch)
        reference = _leaves(pair.simulator.run(values, on=False))
        found.signal += sum(noise_sums((leaf, leaf), ((0, 1),))[0].signal for leaf in reference)
        for site in pair.sites:
            for name, variant in variants(site).items():
                outputs = _leaves(_alone(pair, site, variant).run(values, on={site.index}))
                noise = sum(noise_sums(both, ((0, 1),))[0].noise for both in zip(reference, outputs, strict=True))
                found.noise[site.index, name] = found.noise.get((site.index, name), 0.0) + noise
    return found


def _alone(pair: QuantizedPair, site: Site, variant: Variant) -> Simulator:
    if site.kind == "activation":

        def rounded(x: Tensor, *, out: Tensor | None = None, stats: Any = None) -> Any:
            return variant.end(x)

        return Simulator(with_parameters(pair.program, {site.index: rounded}, {}))
    constant = next(each for each in pair.program.constants if each.site == site.index)
    return Simulator(with_parameters(pair.program, {}, {site.index: variant.end(constant.reference)}))


def _leaves(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
