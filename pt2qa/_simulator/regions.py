"""Regions: the ops that are quantized as one unit.

Two ops belong to one region if there is no site between them, if nothing else reads the value, and if the second is a
pointwise op that backends fuse with the first (conv + relu, linear + gelu, conv + batch norm).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pt2qa._simulator.op_rules import is_epilogue
from pt2qa._simulator.program import Constant, Region, Site, Step


def find_regions(
    steps: Sequence[Step], sites: Sequence[Site], constants: Sequence[Constant], producers: dict[int, int]
) -> list[Region]:
    """Numbers the regions in graph order and writes the number into each op's step."""
    readers: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        for slot in step.reads:
            readers[slot].append(step)
    members: dict[int, list[Step]] = {}
    for step in steps:
        if step.site is not None:
            continue
        before = steps[producers[step.reads[0]]] if step.reads and step.reads[0] in producers else None
        joins = (
            before is not None
            and before.site is None
            and (step.op == "getitem" or (is_epilogue(step.op) and len(readers[before.out]) == 1))
        )
        step.region = before.region if joins and before is not None else len(members)
        members.setdefault(step.region, []).append(step)
    site_of_result = {site.result: site.index for site in sites}
    sites_of_source: dict[int, list[int]] = defaultdict(list)
    for site in sites:
        if site.result != site.source:
            sites_of_source[site.source].append(site.index)
    regions = []
    for number, own in members.items():
        around: set[int] = set()
        for step in own:
            around.update(site_of_result[slot] for slot in (*step.reads, *step.constants) if slot in site_of_result)
            around.update(sites_of_source[step.out])
        regions.append(
            Region(
                index=number,
                name=own[0].name,
                ops=tuple(step.name for step in own),
                steps=tuple(step.index for step in own),
                sites=tuple(sorted(around)),
            )
        )
    return regions
