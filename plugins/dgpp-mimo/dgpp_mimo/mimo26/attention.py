"""Attention over everything before a row, or over a window of it with sinks, from a projection stored in chunks."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.formats.cache_rows import pack_fp8_rows, unpack_fp8_rows
from dgpp_core.layers.paged import PagedIndex
from dgpp_core.layers.stream import divided_parts
from dgpp_core.layers.window import Read, window_attend
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.rope import RotaryTable, rotate
from dgpp_mimo.mimo26.config import Heads, Mimo26Config


class Ropes:
    """Rotary tables of the two kinds of attention."""

    def __init__(self, config: Mimo26Config, device: torch.device) -> None:
        def table(heads: Heads) -> RotaryTable:
            return RotaryTable(heads.rotary_dim, config.max_positions, heads.theta, device)

        self.whole, self.window = table(config.whole), table(config.window)


class Step:
    """What every layer of a step needs, computed once.

    Args:
        batch: positions below zero are those of rows of nothing, which only window layers may run.
    """

    def __init__(self, batch: StepBatch, state: State, ropes: Ropes) -> None:
        self.batch, self.state, self.decode = batch, state, batch.keep_rows
        self._ropes = ropes

    @functools.cached_property
    def paged(self) -> PagedIndex:
        """Where rows are kept in the paged groups."""
        return PagedIndex(self.batch, self.state["k"].shape[3])

    @functools.cached_property
    def whole_angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the layers that attend to everything."""
        return self._ropes.whole.at(self.batch.positions)

    @functools.cached_property
    def window_angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines for window layers."""
        return self._ropes.window.at(self.batch.positions.clamp(min=0))


Pair = tuple[Tensor, Tensor]
"""Of keys and of values."""


class Attention:
    """Attention to everything before a row and itself, over paged rows.

    Args:
        part: prefix of the parameters' names.
        place: of the layer in its state groups.
    """

    groups = ("k", "v")

    def __init__(self, config: Mimo26Config, shard: Shard, part: str, place: int) -> None:
        self.bus, self.place, heads = shard.bus, place, self.heads_of(config)
        self.chunks, self.value_scale = config.chunks // shard.bus.world, config.value_scale
        self.widths = heads.width, heads.width, heads.value_width
        counts = (heads.count // config.chunks, heads.kv // config.chunks, heads.kv // config.chunks)
        self.sizes = [count * width for count, width in zip(counts, self.widths, strict=True)]
        self.scale = heads.width**-0.5
        self.qkv = Linear.load(shard, f"{part}.qkv")
        self.load(config, shard, part)
        self.o = Linear.load(shard, f"{part}.o")

    @staticmethod
    def heads_of(config: Mimo26Config) -> Heads:
        """Shapes of this kind of attention."""
        return config.whole

    def load(self, config: Mimo26Config, shard: Shard, part: str) -> None:
        """Take what this kind has beside its products."""

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """``[S, R, hidden]`` to add to the stream."""
        rows = self.qkv.wide(x, step.decode).view(len(x), self.chunks, -1)
        q, k, v = (
            part.reshape(len(x), -1, width)
            for part, width in zip(torch.split(rows, self.sizes, -1), self.widths, strict=True)
        )  # fmt: skip
        angles = self.angles(step)
        q, k, v = rotate(q, *angles).to(x.dtype), rotate(k, *angles), v * self.value_scale
        pools = [step.state[name][self.place] for name in self.groups]
        read = None
        if pools[0].dtype == torch.uint8:
            k, v, read = pack_fp8_rows(k.to(x.dtype)), pack_fp8_rows(v.to(x.dtype)), unpack_fp8_rows
        out = self.attend(q, (k, v), (pools[0], pools[1]), step, read)
        return divided_parts(self.o, self.bus, out.flatten(1), step.decode)

    def angles(self, step: Step) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the step's rows."""
        return step.whole_angles

    def attend(self, q: Tensor, rows: Pair, pools: Pair, step: Step, read: Read | None) -> Tensor:
        """Write the step's rows, then let each see all rows up to its own; ``[R, heads, value width]``."""
        k_pool, v_pool = pools
        for pool, part in zip(pools, rows, strict=True):
            step.paged.write(pool, part)
        if read is None:
            return step.paged.attend(q, k_pool, v_pool, self.scale)
        stored = read
        return step.paged.attend_read(q, lambda blocks: (stored(k_pool[blocks]), stored(v_pool[blocks])), self.scale)


class WindowAttention(Attention):
    """Attention to the last rows in a ring, with a learned logit a head that takes a share and gives nothing."""

    groups = ("window_k", "window_v")

    @staticmethod
    def heads_of(config: Mimo26Config) -> Heads:
        """Shapes of this kind of attention."""
        return config.window

    def load(self, config: Mimo26Config, shard: Shard, part: str) -> None:
        """Take the sinks."""
        self.window, self.sinks = config.window_rows, shard.weights.take(f"{part}.sinks")

    def angles(self, step: Step) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the step's rows."""
        return step.window_angles

    def attend(self, q: Tensor, rows: Pair, pools: Pair, step: Step, read: Read | None) -> Tensor:
        """Write the step's rows and let each see those of its window; ``[R, heads, value width]``."""
        kinds = {"window": self.window, "scale": self.scale}
        return window_attend(step.batch, q, *rows, *pools, sinks=self.sinks, read=read, **kinds)


class DraftAttention(WindowAttention):
    """The same in a draft block."""

    groups = ("draft_k", "draft_v")
