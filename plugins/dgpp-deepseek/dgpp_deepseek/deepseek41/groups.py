"""What DeepSeek-V4.1-Flash keeps of a request. Torch-free.

Rows are kept in the forms that the model was trained with, whatever ``kv_dtype`` says, which is refused where it says
anything: an e4m3 window row with an exponent for every 32 values, an e2m1 entry with an e4m3 scale for every 16, an
e2m1 index key with an exponent for every 32 (`dgpp_core.formats.cache_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from dgpp_core.api import ConfigError, PagedGroup, StateGroup, WindowGroup
from dgpp_core.api.state import Dtype
from dgpp_deepseek.deepseek41.config import Deepseek41Config

RATIOS = (2, 1)
Kept = Literal["native", "plain"]
"""As trained, or as computed: plain rows are for comparing the arithmetic with equations that round nothing."""


class Widths(msgspec.Struct, frozen=True):
    """Elements of one row of each kind, and what they are."""

    window: int
    entry: int
    key: int
    dtype: Dtype

    @classmethod
    def of(cls, c: Deepseek41Config, kept: Kept) -> Widths:
        """Bytes of the trained forms, or values."""
        if kept == "plain":
            return cls(c.latent, c.latent, c.index_width, "compute")
        entry, key = c.latent // 2 + c.latent // 16, c.index_width // 2 + c.index_width // 32
        return cls(c.latent + c.latent // 32, entry, key, "uint8")


def groups(
    c: Deepseek41Config, world: int, settings: Mapping[str, Any], kept: Kept = "native"
) -> tuple[StateGroup, ...]:
    """State of one rank: every rank keeps all of it.

    An entry of ratio 2 lies in the rows of its two tokens, half of it in each.

    Raises:
        ConfigError: ``world`` ranks cannot share the model, a ``kv_dtype``, blocks that would cut an entry.
    """
    _require_ranks(c, world)
    if (found := settings.get("kv_dtype", "bf16")) != "bf16":
        raise ConfigError(
            "this model keeps its rows in the forms it was trained with",
            where="engine.kv_dtype", found=found, expected="no kv_dtype",
        )  # fmt: skip
    size = settings.get("block_tokens", max(RATIOS))
    if any(size % c.ratios[source] for source in c.sources):
        raise ConfigError(
            "a paged block would cut an entry of two tokens",
            where="engine.block_tokens", found=str(size), expected="an even number",
        )  # fmt: skip
    widths = Widths.of(c, kept)

    def window(name: str, layers: int) -> WindowGroup:
        return WindowGroup(name=name, layers=layers, heads=1, width=widths.window, window=c.window, dtype=widths.dtype)

    return (
        *(group for ratio in RATIOS for group in _paged(c, ratio, widths)),
        window("window", c.layers),
        window("draft_window", c.stages),
        WindowGroup(name="ngram_tokens", layers=1, heads=1, width=1, window=c.ngram_size - 1, dtype="int64"),
    )


def _paged(c: Deepseek41Config, ratio: int, widths: Widths) -> Iterator[StateGroup]:
    """Entries and index keys of the sources of one ratio, and what an entry of several tokens waits for."""
    if not (layers := sum(c.ratios[source] == ratio for source in c.sources)):
        return
    for name, width in (("entries", widths.entry), ("keys", widths.key)):
        yield PagedGroup(name=f"{name}_{ratio}", layers=layers, heads=1, width=width // ratio, dtype=widths.dtype)
    if ratio > 1:
        yield WindowGroup(name="halves", layers=layers, heads=1, width=2 * c.latent, window=ratio - 1)


def _require_ranks(c: Deepseek41Config, world: int) -> None:
    """Whole groups of heads, slots, vocabulary rows; experts in whole groups of 32 where those have scales."""
    unit = 32 if c.quantised else 1
    wanted = {
        "o_groups": (c.output_groups, world), "vocab_size": (c.vocab_size, world),
        "rows of n-grams": (c.ngram_slots, world),
        "moe_intermediate_size": (c.moe_intermediate_size, unit * world),
    }  # fmt: skip
    for name, (size, parts) in wanted.items():
        if size % parts:
            raise ConfigError(
                f"{world} ranks cannot share the model", where="world_size", found=f"{name} {size}",
                expected=f"a multiple of {parts}", hint="choose 1, 2 or 4 ranks",
            )  # fmt: skip
