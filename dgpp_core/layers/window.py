"""Sliding-window attention over a ring of the last rows of each slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.ops.tile_attention import tile_attention

TILE = 64

Read = Callable[[Tensor], Tensor]


def window_attend(
    batch: StepBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    *,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    read: Read | None = None,
) -> Tensor:
    """Attention of each row over itself and the ``window - 1`` rows before it; writes the step's rows into the ring.

    Args:
        q: ``[R, query heads, D]``.
        k, v: the step's rows, ``[R, kv heads, D]`` and ``[R, kv heads, Dv]``.
        k_ring, v_ring: one layer's rings, ``[slots, kv heads, ring, D or Dv]``, ``ring >= window + n`` for a verify
            step of n rows a segment.
        sinks: ``[query heads]``, as in `tile_attention`.
        read: where ``k``, ``v`` and the rings are stored rows, from ``[..., stored width]`` to the values to use.

    Returns:
        ``[R, query heads, Dv]``.

    Keys are taken in tiles at multiples of `TILE` of the absolute position, so that a row's tiles do not depend on
    where a chunk began. With sinks, rows may have positions below zero (`dgpp_core.layers.history`): no row sees them,
    and they see nothing.
    """
    if batch.keep_rows and batch.uniform is not None:
        return _attend_uniform(batch, q, k, v, k_ring, v_ring, window, scale, sinks, read)
    outs, row = [], 0
    for segment, count in enumerate(batch.counts):
        rows = slice(row, row + count)
        row += count
        slot, start = int(batch.slots[segment]), int(batch.lengths[segment])
        rings = k_ring[slot], v_ring[slot]
        outs.append(_attend_chunk(q[rows], k[rows], v[rows], *rings, start, window, scale, sinks, read))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _visible(keys: Tensor, positions: Tensor, window: int) -> Tensor:
    """bool ``[B, tiles, n, TILE]`` from key positions ``[B, tiles * TILE]`` and row positions ``[B, n]``."""
    tiled = keys.view(keys.shape[0], -1, 1, TILE)
    rows = positions.view(positions.shape[0], 1, -1, 1)
    return (tiled <= rows) & (tiled > rows - window) & (tiled >= 0)


def _tiles(rows: Tensor, read: Read | None) -> Tensor:
    """``[B, kv heads, tiles * TILE, D]`` to ``[B, tiles, kv heads, TILE, D]``, read from their stored form."""
    rows = rows if read is None else read(rows)
    batch, heads, keys, width = rows.shape
    return rows.view(batch, heads, keys // TILE, TILE, width).transpose(1, 2)


def _attend_uniform(
    batch: StepBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None,
    read: Read | None,
) -> Tensor:
    n, ring, segments = batch.counts[0], k_ring.shape[2], len(batch.counts)
    positions = batch.positions.view(segments, n)
    place = positions % ring
    slots = batch.slots.view(-1, 1)
    k_ring[slots, :, place] = k.view(segments, n, *k.shape[1:]).to(k_ring.dtype)
    v_ring[slots, :, place] = v.view(segments, n, *v.shape[1:]).to(v_ring.dtype)
    tiles = -(-(window + n) // TILE) + 1
    base = (batch.lengths - window + 1).clamp(min=0) // TILE * TILE
    keys = base.view(-1, 1) + torch.arange(tiles * TILE, device=q.device)
    take = (keys % ring).view(segments, 1, -1)
    heads = torch.arange(k_ring.shape[1], device=q.device).view(1, -1, 1)
    chosen_k, chosen_v = k_ring[slots.view(-1, 1, 1), heads, take], v_ring[slots.view(-1, 1, 1), heads, take]
    queries = q.view(segments, n, *q.shape[1:])
    visible = _visible(keys, positions, window)
    out = tile_attention(queries, _tiles(chosen_k, read), _tiles(chosen_v, read), visible, scale, sinks)
    return out.flatten(0, 1)


def _attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    start: int,
    window: int,
    scale: float,
    sinks: Tensor | None,
    read: Read | None,
) -> Tensor:
    count, ring = q.shape[0], k_ring.shape[1]
    base = max(min(0, start), start - window + 1) // TILE * TILE
    tiles = -(-(start + count - base) // TILE)
    keys = torch.arange(base, base + tiles * TILE, device=q.device)
    all_k, all_v = k_ring[:, keys % ring], v_ring[:, keys % ring]
    own = slice(start - base, start - base + count)
    all_k[:, own], all_v[:, own] = k.transpose(0, 1).to(all_k.dtype), v.transpose(0, 1).to(all_v.dtype)
    positions = torch.arange(start, start + count, device=q.device)
    visible = _visible(keys.unsqueeze(0), positions.unsqueeze(0), window)
    out = tile_attention(
        q.unsqueeze(0), _tiles(all_k.unsqueeze(0), read), _tiles(all_v.unsqueeze(0), read), visible, scale, sinks
    )
    kept = slice(max(0, count - ring), count)
    place = positions[kept] % ring
    k_ring[:, place], v_ring[:, place] = (
        k[kept].transpose(0, 1).to(k_ring.dtype),
        v[kept].transpose(0, 1).to(v_ring.dtype),
    )
    return out[0]
