"""Random steps of paged attention and what must come out, by brute force in float64.

Pools are NaN wherever no token of the step's requests lies, so whatever is read by mistake shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.ops.kernels.heads import HeadShape
from dgpp_core.ops.rope import RotaryTable


class Layer(msgspec.Struct, frozen=True, eq=False):
    """Parameters of an attention layer, random; absent where ``shape`` says so."""

    shape: HeadShape
    scale: float
    eps: float
    bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    rope: RotaryTable | None

    @classmethod
    def random(cls, shape: HeadShape, device: torch.device, positions: int, dtype: torch.dtype) -> Layer:
        """Parameters in ``dtype``; the angles reach up to ``positions``."""
        g = torch.Generator().manual_seed(7)
        heads = shape.kv_heads * (shape.share + 2)
        bias = (torch.randn(heads * shape.width, generator=g) * 0.2).to(device, dtype) if shape.biased else None
        q_norm, k_norm = ((1 + 0.3 * torch.randn(shape.width, generator=g)).to(device, dtype) for _ in range(2))
        rope = RotaryTable(shape.rotated, positions, 10000.0, device) if shape.rotated else None
        if not shape.normed:
            return cls(shape, shape.width**-0.5, 1e-5, bias, None, None, rope)
        return cls(shape, shape.width**-0.5, 1e-5, bias, q_norm, k_norm, rope)


class Step(msgspec.Struct, frozen=True, eq=False):
    """One step: its rows as projected, and pools that hold what lies before them."""

    qkv: Tensor
    batch: StepBatch
    k_pool: Tensor
    v_pool: Tensor

    def copy(self) -> Step:
        """The same step with pools of its own."""
        return msgspec.structs.replace(self, k_pool=self.k_pool.clone(), v_pool=self.v_pool.clone())

    @property
    def row_segment(self) -> list[int]:
        """Segment of each row."""
        return [segment for segment, count in enumerate(self.batch.counts) for _ in range(count)]

    def places(self) -> tuple[Tensor, Tensor]:
        """Block and offset of each row's position, int64 ``[R]``."""
        block_tokens = self.k_pool.shape[2]
        tables = self.batch.block_tables[self.row_segment]
        block = tables.gather(1, (self.batch.positions // block_tokens).unsqueeze(1)).squeeze(1)
        return block, self.batch.positions % block_tokens

    def part(self, rows: slice, segment: int, keep_rows: bool) -> Step:
        """The step of some consecutive rows of one segment alone, over the same pools."""
        batch = self.batch
        return msgspec.structs.replace(
            self,
            qkv=self.qkv[rows].contiguous(),
            batch=msgspec.structs.replace(
                batch,
                tokens=batch.tokens[rows],
                positions=batch.positions[rows].contiguous(),
                counts=(rows.stop - rows.start,),
                slots=batch.slots[segment : segment + 1],
                lengths=batch.positions[rows][:1],
                block_tables=batch.block_tables[segment : segment + 1].contiguous(),
                candidates=batch.candidates[segment : segment + 1],
                keep_rows=keep_rows,
            ),
        )


def random_step(
    shape: HeadShape,
    contexts: Sequence[int],
    counts: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    keep_rows: bool,
    seed: int = 0,
) -> Step:
    """``counts[i]`` rows of request i after ``contexts[i]`` cached tokens, in blocks of random order."""
    g = torch.Generator().manual_seed(seed)
    block = shape.block
    needed = [-(-(context + count) // block) for context, count in zip(contexts, counts, strict=True)]
    order = (torch.randperm(sum(needed), generator=g) + 1).tolist()
    tables = torch.zeros(len(counts), max(needed) + 1, dtype=torch.int64)
    pools = [torch.full((sum(needed) + 1, shape.kv_heads, block, shape.width), float("nan")) for _ in range(2)]
    for segment, (context, blocks) in enumerate(zip(contexts, needed, strict=True)):
        tables[segment, :blocks] = torch.tensor([order.pop() for _ in range(blocks)])
        t = torch.arange(context)
        for pool in pools:
            cached = torch.randn(context, shape.kv_heads, shape.width, generator=g)
            pool[tables[segment, t // block], :, t % block] = cached
    rows = sum(counts)
    starts = torch.tensor(contexts)
    positions = torch.cat([start + torch.arange(count) for start, count in zip(contexts, counts, strict=True)])
    batch = StepBatch(
        tokens=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=positions.to(device),
        counts=tuple(counts),
        slots=torch.arange(len(counts), device=device),
        lengths=starts.to(device),
        block_tables=tables.to(device),
        candidates=torch.zeros(len(counts), dtype=torch.int64, device=device),
        keep_rows=keep_rows,
        max_length=int(positions.max()) + 1,
    )
    qkv = torch.randn(rows, shape.kv_heads * (shape.share + 2) * shape.width, generator=g)
    return Step(qkv.to(device), batch, *(pool.to(device, dtype) for pool in pools))


def finished_heads(layer: Layer, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[R, heads, width]`` after bias, norm and rotation; float64, rounded to the pools."""
    shape, dtype = layer.shape, step.k_pool.dtype
    x = step.qkv.double() + (0 if layer.bias is None else layer.bias.double())
    cuts = [shape.kv_heads * shape.share, shape.kv_heads, shape.kv_heads]
    q, k, v = torch.split(x.view(len(x), -1, shape.width), cuts, dim=1)

    def finished(heads: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            heads = heads / (heads.square().mean(-1, keepdim=True) + layer.eps).sqrt() * norm.double()
        if layer.rope is not None:
            half = shape.rotated // 2
            cos, sin = (table.double()[step.batch.positions].unsqueeze(1) for table in (layer.rope.cos, layer.rope.sin))
            first, second = heads[..., :half], heads[..., half : 2 * half]
            turned = (first * cos - second * sin, second * cos + first * sin)
            heads = torch.cat([*turned, heads[..., 2 * half :]], -1)
        return heads.to(dtype).double()

    return finished(q, layer.q_norm), finished(k, layer.k_norm), v.to(dtype).double()


def expected(layer: Layer, step: Step) -> Tensor:
    """Causal attention of every row, float64 ``[R, heads * width]``."""
    block = step.k_pool.shape[2]
    q, k, v = finished_heads(layer, step)
    out = []
    for row, segment in enumerate(step.row_segment):
        position = int(step.batch.positions[row])
        start = int(step.batch.lengths[segment])
        t = torch.arange(start, device=q.device)
        spot = (step.batch.block_tables[segment, t // block], slice(None), t % block)
        mine = slice(row - (position - start), row + 1)
        keys, values = (
            torch.cat([step.k_pool[spot].double(), k[mine]]),
            torch.cat([step.v_pool[spot].double(), v[mine]]),
        )
        queries = q[row].view(layer.shape.kv_heads, layer.shape.share, -1)
        weights = torch.softmax(torch.einsum("gsd,tgd->gst", queries, keys) * layer.scale, -1)
        out.append(torch.einsum("gst,tgd->gsd", weights, values).flatten())
    return torch.stack(out)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 distance of the worst row; NaN if anything is."""
    distance = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float("nan") if bool(distance.isnan().any()) else float(distance.max())
