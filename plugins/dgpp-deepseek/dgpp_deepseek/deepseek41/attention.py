"""Attention to a window of rows and to chosen entries: one row is key and value of all heads."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.tile_attention import tile_attention
from dgpp_deepseek.deepseek41.config import Deepseek41Config
from dgpp_deepseek.deepseek41.entries import Chooser, Compressor, entry_pool
from dgpp_deepseek.deepseek41.rows import ENTRY, WINDOW
from dgpp_deepseek.deepseek41.step import Angles, Step, summed, tiles_of, turned


class Projections:
    """The products around an attention, for one rank's heads."""

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str) -> None:
        self.bus, self.dtype, self.eps = shard.bus, shard.dtype, config.rms_norm_eps
        self.latent, self.scale = config.latent, config.latent**-0.5
        self.query_latent, self.queries = (Linear.load(shard, f"{part}.{n}") for n in ("query_latent", "queries"))
        self.rows_of = Linear.load(shard, f"{part}.rows")
        self.query_norm, self.row_norm, self.sinks = (
            shard.weights.take(f"{part}.{name}") for name in ("query_norm", "row_norm", "sinks")
        )
        grouped, count = shard.weights.matrix(f"{part}.output_groups"), config.output_groups // shard.bus.world
        rank = grouped.shape[0] // count
        self.groups = [Linear(grouped.rows(group * rank, rank)) for group in range(count)]
        self.output = Linear.load(shard, f"{part}.output")

    def read(self, u: Tensor, angles: Angles, decode: bool) -> tuple[Tensor, Tensor]:
        """From ``[R, width]``: the queries' latents ``[R, rank]`` and the queries ``[R, heads, latent]``, turned."""
        latent = rms_norm(self.query_latent(u, decode), self.query_norm, self.eps, self.dtype)
        queries = self.queries(latent, decode).view(len(u), -1, self.latent)
        return latent, turned(queries, angles)

    def row(self, u: Tensor, angles: Angles, decode: bool) -> Tensor:
        """The rows that are key and value, ``[R, latent]``."""
        rows = rms_norm(self.rows_of(u, decode), self.row_norm, self.eps, self.dtype)
        return turned(rows.unsqueeze(1), angles).squeeze(1)

    def write(self, mixed: Tensor, angles: Angles, decode: bool) -> Tensor:
        """From what the heads give ``[R, heads, latent]``, turned back, to float32 ``[R, width]``."""
        parts = turned(mixed, angles, back=True).view(len(mixed), len(self.groups), -1)
        middle = [group(parts[:, number].contiguous(), decode) for number, group in enumerate(self.groups)]
        return summed(self.output, self.bus, torch.cat(middle, dim=-1), decode)


class Attention:
    """Of a layer of the target model."""

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str, layer: int) -> None:
        self.layer, self.ratio, self.window, self.latent = layer, config.ratios[layer], config.window, config.latent
        self.place = config.place_of(config.source_of(layer)) if self.ratio else 0
        self.projections = Projections(config, shard, part)
        own, chooses = layer in config.sources, layer in config.choosers
        self.compressor = Compressor(config, shard, f"{part}.compressor", layer) if own else None
        self.chooser = Chooser(config, shard, f"{part}.indexer", layer) if chooses else None

    def __call__(self, u: Tensor, step: Step) -> Tensor:
        """float32 ``[R, width]`` from ``[R, width]``; writes the rows' state."""
        made, angles = self.projections, step.compressed if self.ratio else step.plain
        latent, q = made.read(u, angles, step.decode)
        ring = step.state["window"][self.layer]
        rows = WINDOW.pack(made.row(u, angles, step.decode), ring.dtype)
        if not step.published:
            self.publish(u, step)
        if self.chooser is not None:
            self.chooser(u, latent, step)
        mixed = torch.cat([
            self._mix(q[group], window, number, step)
            for number, ((group, _, _), window) in enumerate(
                zip(step.paged.groups, step.windows(rows, ring, self.window), strict=True)
            )
        ])  # fmt: skip
        return made.write(mixed, angles, step.decode)

    def publish(self, u: Tensor, step: Step) -> None:
        """Write the entries of a source that end at the rows of ``u``."""
        if self.compressor is not None:
            self.compressor(u, step)

    def _mix(self, q: Tensor, window: Tensor, number: int, step: Step) -> Tensor:
        """What a group's queries ``[B * n, heads, latent]`` make of their windows ``[B, ., width]`` and entries."""
        rows, blocks, _ = step.paged.groups[number]
        count, reach = len(blocks), self.window - 1
        positions = step.batch.positions[rows].view(count, -1)
        span = step.paged.block_tokens // max(1, self.ratio)
        held, at = tiles_of(window, positions[:, 0] - reach, span)
        keys, own = at.view(count, -1, 1, span), positions.view(count, 1, -1, 1)
        seen = (keys <= own) & (keys > own - self.window)
        if floor := step.floors[number]:
            seen = seen & (keys >= floor)
        values = WINDOW.unpack(held, self.latent).view(count, -1, 1, span, self.latent)
        if self.ratio:
            pool = entry_pool(step, "entries", self.ratio, self.place)
            entries = ENTRY.unpack(pool[blocks], self.latent).unsqueeze(2)
            values, seen = torch.cat((values, entries), 1), torch.cat((seen, step.chosen[number]), 1)
        queries = q.view(count, -1, *q.shape[1:])
        return tile_attention(queries, values, values, seen, self.projections.scale, self.projections.sinks).flatten(
            0, 1
        )
