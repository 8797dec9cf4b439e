"""The thin matrix leaves out combinations, and no pair of values."""

import itertools

import msgspec
import pytest

from dgpp_core.testing.matrix import Axes, Cell, cells_of

KIT = [
    Axes(depths=range(4), thin=True), Axes(depths=range(2), thin=True), Axes(depths=(0,), thin=True),
    Axes(depths=(0, 2, 5), chunks=(16,), company=(0, 3), thin=True),
    Axes(worlds=(2, 4), depths=range(4), chunks=(16,), company=(3,), evicting=False, thin=True),
]  # fmt: skip


def values(cell: Cell) -> list[dict[str, int]]:
    """The cell's ways of computing a reply, each as its value on every axis."""
    world = {"ranks": cell.ranks, "chunk": cell.chunk, "depth": cell.depth, "lag": cell.lag}
    ways = [
        world | {"company": company, "hit": hit, "swapped": swapped}
        for company in cell.company
        for hit in (False, True)
        for swapped in cell.swapped[hit]
    ]
    return ways + [world | {"evicting": True}] * cell.evicting


def pairs(axes: Axes) -> set[tuple[tuple[str, int], ...]]:
    ways = [way for cell in cells_of(axes) for way in values(cell)]
    return {pair for way in ways for pair in itertools.combinations(sorted(way.items()), 2)}


@pytest.mark.parametrize("axes", KIT, ids=["kit", "two depths", "no drafts", "one chunk", "ranks"])
def test_every_value_of_an_axis_meets_every_value_of_another(axes: Axes) -> None:
    whole = msgspec.structs.replace(axes, thin=False)
    missing = pairs(whole) - pairs(axes)
    # What is greedy among the cold is seeded among the hits: the two are one axis then, and prompts take both parts.
    assert missing == {(("hit", hit), ("swapped", not hit)) for hit in (False, True)}
    ways, all_ways = (sum(len(values(cell)) for cell in cells_of(each)) for each in (axes, whole))
    assert ways < 0.7 * all_ways
