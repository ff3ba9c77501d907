"""Gain for cost: what is freed together, and what comes first."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

from pt2qa._reconfigure.candidates import Costs, EditCandidate, order_bundles, sites_off, total_noise
from pt2qa.overrides.annotations import Edge
from pt2qa.overrides.plan import Edit


def edge(source: str, reader: str) -> Edge:
    return Edge(source, reader, "activation", "int8")


A_OUT, B_IN, B_OUT = edge("a", ""), edge("a", "b"), edge("b", "")
WEIGHT_A, WEIGHT_B = Edge("a.weight", "a", "weight", "int8"), Edge("b.weight", "b", "weight", "int8")
EDGES_OF = {
    0: frozenset({WEIGHT_A}),
    1: frozenset({A_OUT, B_IN}),  # between a and b: both ask for it
    2: frozenset({WEIGHT_B}),
    3: frozenset({B_OUT}),
}
A = EditCandidate(Edit("float", ("a",)), frozenset({WEIGHT_A, A_OUT}), 0.2)
B = EditCandidate(Edit("float", ("b",)), frozenset({WEIGHT_B, B_IN, B_OUT}), 0.1)
FUSE = EditCandidate(Edit("fuse", ("a", "b")), frozenset({A_OUT, B_IN}), 0.0)


def test_a_site_that_two_ops_ask_for_takes_two_edits() -> None:
    assert sites_off([A], EDGES_OF) == {0}
    assert sites_off([B], EDGES_OF) == {2, 3}
    assert sites_off([A, B], EDGES_OF) == {0, 1, 2, 3}


def test_both_edits_are_chosen_together_where_what_lies_between_makes_the_noise() -> None:
    bundles = order_bundles([A, B], EDGES_OF, {0: (1.0,), 1: (100.0,), 2: (1.0,), 3: (1.0,)})
    assert [set(bundle.members) for bundle in bundles] == [{0, 1}]
    assert bundles[0].gain == (103.0,)
    assert bundles[0].off == {0, 1, 2, 3}


def test_gain_for_cost_decides() -> None:
    bundles = order_bundles([A, B], EDGES_OF, {0: (3.0,), 1: (0.1,), 2: (1.0,), 3: (1.0,)})
    assert [bundle.members for bundle in bundles] == [(1,), (0,)]  # 2 / 0.1 before 3.1 / 0.2
    assert bundles[1].gain == (3.1,)  # with b gone, a frees what lies between as well


def test_what_costs_nothing_comes_first() -> None:
    bundles = order_bundles([A, B, FUSE], EDGES_OF, {0: (1e9,), 1: (0.1,), 2: (1.0,), 3: (1.0,)})
    assert bundles[0].members == (2,)
    assert bundles[0].cost == 0.0


def test_edits_without_gain_are_left_out() -> None:
    assert order_bundles([A], EDGES_OF, {1: (5.0,)}) == []


def test_sums_are_the_same_in_any_order() -> None:
    """The order of a set of names is another one in each process."""
    shares = dict.fromkeys("abcdefghij", 0.1)
    costs, whole = Costs(shares, shares, 0.0), float(sum(map(Fraction, shares.values())))
    assert costs.macs_of("abcdefghij") == costs.bytes_of("jihgfedcba") == whole == 1.0
    noise = {0: (0.1,), 1: (0.2,), 2: (0.3,)}
    assert len({total_noise(noise, sites, range(1)) for sites in permutations(noise)}) == 1
