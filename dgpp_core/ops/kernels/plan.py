"""How a decode product is cut, by the weight's shape and form alone: never by the number of rows.

W warps of a program and S splits share K; both decide the order of a row's sum, so its bits. R row tiles a program and
the slots loaded ahead change speed only. Measured on an H200: four warps; one row tile, or two where K is split; S
such that about 480 programs or more are in flight and a warp walks at most 12 slots.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct

Form = Literal["bf16", "bf12", "fp8", "nvfp4"]

SLOT = 128
"""k that a warp loads at once."""
_MOST_SLOTS = 32
"""Slots of a warp in a row, unrolled; more take minutes to compile."""
_PROGRAMS = 440
_MOST_SPLITS = 8
_WIDE_ROWS = 20_000
"""Rows from which two gate and two up tiles a program still make enough programs."""
_AHEAD: dict[Form, tuple[int, int]] = {"bf16": (2, 2), "bf12": (2, 2), "fp8": (5, 2), "nvfp4": (3, 2)}
"""Slots in flight, for up to 8 and for more rows."""


class Plan(Struct, frozen=True):
    """Cut of one product.

    Args:
        tiles: row tiles of 16 a program, for up to 8 and for more rows.
        ahead: slots in flight, for up to 8 and for more rows.
        fused: gate and up rows meet in one program, whose result is silu(gate) · up.
        capped: at most 128 registers a thread, so that four programs share an SM and a split product is one wave.
    """

    warps: int
    splits: int
    tiles: tuple[int, int]
    ahead: tuple[int, int]
    fused: bool = False
    capped: bool = False

    def meta(self, rows: int, columns: int, m: int) -> Mapping[str, Any]:
        """Compile-time arguments of the kernel for ``m`` rows of activations: 8 columns a tile, or 16 for more rows."""
        return _decode_meta(self, rows, columns, m > 8, m > 16)


@functools.cache
def _decode_meta(cut: Plan, rows: int, columns: int, wide: bool, again: bool) -> Mapping[str, Any]:
    """``again``: there are several tiles of columns, and each reads the weights."""
    meta = {
        "N": rows,
        "K": columns,
        "COLUMNS": 16 if wide else 8,
        "W": cut.warps,
        "R": cut.tiles[wide],
        "AHEAD": cut.ahead[wide],
        "SPLITS": cut.splits,
        "GATED": cut.fused,
        "CACHE": ".cg" if again else "evict_first",
        "PDL": True,
        "num_warps": cut.warps,
        "launch_pdl": True,
    }
    return MappingProxyType(meta | ({"maxnreg": 128} if cut.capped else {}))


def plan(form: Form, rows: int, columns: int, gated: bool = False) -> Plan | None:
    """The cut for a weight ``[rows, columns]``, None where it does not fit fragments.

    Args:
        gated: the rows are gate rows, then as many up rows; K is not split. FP8 and bf12 have too much in registers
            to take both into one program: they are multiplied as they are.
    """
    fused = gated and form in ("bf16", "nvfp4")
    if rows % (32 if fused else 16) or columns % SLOT:
        return None
    slots = columns // SLOT
    warps = next(w for w in (4, 2, 1) if slots % w == 0)
    splits = 1 if gated else _splits(rows // 16, slots // warps)
    each = slots // warps // splits
    if each > _MOST_SLOTS:
        return None
    ahead = (2, 2) if fused else _AHEAD[form]
    capped = form in ("fp8", "nvfp4") and not fused
    tiles = _tiles(form, rows, splits, fused)
    return Plan(warps, splits, tiles, (min(ahead[0], each), min(ahead[1], each)), fused, capped)


def _tiles(form: Form, rows: int, splits: int, fused: bool) -> tuple[int, int]:
    """Row tiles a program, for up to 8 and for more rows."""
    if fused:
        return (4 if form == "nvfp4" and rows % 64 == 0 and rows >= _WIDE_ROWS else 2), 2
    if form in ("bf12", "fp8"):
        return 1, 1
    pair = 2 if rows % 32 == 0 else 1
    if form == "nvfp4":
        return pair, pair if splits > 1 else 1
    return (pair, pair) if splits > 1 else (1, pair)


def _splits(tiles: int, slots: int) -> int:
    """Splits of K for a product of ``tiles`` row tiles whose warps walk ``slots`` slots each."""
    allowed = [s for s in range(1, _MOST_SPLITS + 1) if slots % s == 0]
    if tiles >= _PROGRAMS and slots <= 12:
        return 1
    good = [s for s in allowed if s > 1 and tiles // 2 * s >= _PROGRAMS and slots // s <= 12]
    return good[0] if good else allowed[-1]


SERVED: tuple[tuple[Form, int, int, bool], ...] = (
    ("bf16", 14336, 5120, False),
    ("bf16", 5120, 12288, False),
    ("bf16", 151552, 5120, False),
    ("bf16", 24576, 5120, True),
    ("bf16", 5120, 10240, False),
    ("bf12", 14336, 5120, False),
    ("bf12", 5120, 12288, False),
    ("bf12", 151552, 5120, False),
    ("fp8", 14336, 5120, False),
    ("fp8", 5120, 12288, False),
    ("fp8", 24576, 5120, True),
    ("nvfp4", 14336, 5120, False),
    ("nvfp4", 5120, 12288, False),
    ("nvfp4", 24576, 5120, True),
)
"""Form, shape and gating of GLM-4.7's dense products, which the tests compile ahead of time."""


def binaries(form: Form, shapes: Iterable[tuple[Form, int, int, bool]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Name and compile-time arguments of each binary of ``form`` among ``shapes``."""
    for other, rows, columns, gated in shapes:
        cut = plan(form, rows, columns, gated)
        if other == form and cut is not None:
            for m, which in ((1, "1 to 8"), (16, "9 to 16"), (64, "more")):
                yield f"{rows}x{columns}{' gated' if cut.fused else ''}, {which} rows", cut.meta(rows, columns, m)


def prefill_meta(
    form: Form, rows: int, columns: int, m: int, capability: int, gated: bool = False
) -> Mapping[str, Any]:
    """Compile-time arguments of the prefill product of ``m`` rows.

    The rows of a tile change speed only. FP8 has two accumulators, so half as many.
    """
    few, many = (64, 128 if form == "fp8" else 256) if capability == 90 else (32, 64)
    return _prefill_meta(form, rows, columns, few if m <= few else many, capability, gated)


@functools.cache
def _prefill_meta(form: Form, rows: int, columns: int, tile: int, capability: int, gated: bool) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "N": rows,
            "K": columns,
            "FORM": form,
            "COLUMNS": tile,
            "DEPTH": 64 if form == "bf16" else 128,
            "W": 8,
            "STAGES": 4 if form == "bf16" or (tile == 64 and capability == 90) else 2,
            "WGMMA": capability == 90,
            "GATED": gated,
            "num_warps": 8,
        }
    )
