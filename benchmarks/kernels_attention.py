"""Attention, norms and token choice of GLM-4.7 on this GPU: ``python benchmarks/kernels_attention.py [--json FILE]``.

A figure is the median of replays of a CUDA graph of launches in a row. Decode attention is measured with the small
kernel that precedes it, which the column "alone" leaves out: both launched in turn, less the small ones launched alone.
Keys and values rotate over pools that no cache holds. The floor is the cache's bytes over the card's measured read
bandwidth in decode, and the causal operations over the tensor cores' measured bfloat16 speed in prefill.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import triton
from msgspec import Struct, structs
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.ops.kernels.attention import CudaGqa, DecodeChoice, capability
from dgpp_core.ops.kernels.attention_prefill import ChunkCut
from dgpp_core.ops.kernels.heads import HeadShape
from dgpp_core.ops.kernels.norms import residual_norm, rms_norm
from dgpp_core.ops.kernels.pick import candidates, greedy
from dgpp_core.ops.rope import RotaryTable
from dgpp_core.testing.compile import compile_all
from dgpp_core.testing.graph_time import timed

READ = 4.38e12
"""Bytes a second that an H200 reads (measured)."""
MULTIPLY = 790e12
"""bfloat16 operations a second of its tensor cores (measured)."""
ROTATED = 150_000_000
"""Bytes of cache rows that launches rotate over: more than twice the cache."""
DEVICE, NARROW = torch.device("cuda"), torch.bfloat16
SHAPE = HeadShape.served()["GLM-4.7"]
HIDDEN, VOCAB = 5120, 151552
MODULES = [
    f"dgpp_core.ops.kernels.{name}"
    for name in ("attention_decode", "attention_strips", "attention_prefill", "norms", "pick")
]


class Places(Struct, frozen=True, eq=False):
    """Where a step's rows lie."""

    batch: StepBatch
    block: Tensor
    offset: Tensor


class Result(Struct, frozen=True):
    """Microseconds of one launch (two of attention in prefill, several of candidates) at ``rows`` and ``context``."""

    name: str
    rows: int
    context: int
    microseconds: float
    floor: float


def layer(choice: DecodeChoice | None = None, cut: ChunkCut | None = None) -> CudaGqa:
    """GLM-4.7's attention with random parameters."""
    heads = SHAPE.kv_heads * SHAPE.share
    bias = torch.randn((heads + 2 * SHAPE.kv_heads) * SHAPE.width, device=DEVICE).to(NARROW)
    q_norm, k_norm = torch.randn(2, SHAPE.width, device=DEVICE).to(NARROW)
    rope = RotaryTable(SHAPE.rotated, 20000, 1e6, DEVICE)
    return CudaGqa(
        heads, SHAPE.kv_heads, SHAPE.width, SHAPE.width**-0.5,
        bias=bias, q_norm=q_norm, k_norm=k_norm, eps=1e-5, rope=rope, choice=choice, cut=cut,
    )  # fmt: skip


def places(segments: int, count: int, context: int, keep_rows: bool) -> Places:
    """``count`` rows of each segment after ``context`` cached tokens."""
    blocks = -(-(context + count) // SHAPE.block)
    tables = torch.randperm(segments * blocks, device=DEVICE).view(segments, blocks) + 1
    positions = (context + torch.arange(count, device=DEVICE)).repeat(segments)
    each = torch.arange(segments, device=DEVICE)
    batch = StepBatch(
        tokens=torch.zeros_like(positions), positions=positions, counts=(count,) * segments, slots=each,
        lengths=torch.full_like(each, context), block_tables=tables, candidates=torch.zeros_like(each),
        keep_rows=keep_rows, max_length=context + count,
    )  # fmt: skip
    block = tables[each.repeat_interleave(count), positions // SHAPE.block]
    return Places(batch, block, positions % SHAPE.block)


def pools(where: Places, copies: int) -> list[tuple[Tensor, Tensor]]:
    """Random pools for the blocks of a step, several times."""
    size = (where.batch.block_tables.numel() + 1, SHAPE.kv_heads, SHAPE.block, SHAPE.width)
    return [
        (torch.randn(size, device=DEVICE, dtype=NARROW), torch.randn(size, device=DEVICE, dtype=NARROW))
        for _ in range(copies)
    ]


def projected(rows: int) -> Tensor:
    """Random float32 queries, keys and values."""
    return torch.randn(rows, SHAPE.kv_heads * (SHAPE.share + 2) * SHAPE.width, device=DEVICE)


def decode(rows: int, context: int, segment: int = 1, choice: DecodeChoice | None = None) -> list[Result]:
    """Decode attention of a layer, with the small kernel before it and alone."""
    gqa, where = layer(choice), places(rows // segment, segment, context, True)
    size = 2 * where.batch.block_tables.numel() * SHAPE.block * SHAPE.kv_heads * SHAPE.width * 2
    held, qkv = pools(where, max(2, min(64, ROTATED // size))), projected(rows)
    residual, weight = torch.randn(rows, HIDDEN, device=DEVICE), torch.ones(HIDDEN, device=DEVICE, dtype=NARROW)
    parts = torch.zeros(1, rows, HIDDEN, device=DEVICE)

    def small(_: int) -> Tensor:
        return residual_norm(residual, parts, weight, 1e-5, NARROW)

    def both(i: int) -> Tensor:
        small(i)
        return gqa(qkv, where, *held[i % len(held)], NARROW)

    launches = max(32, len(held))
    pair, alone = timed(both, launches), timed(small, launches)
    floor = 2 * rows // segment * (context + segment) * SHAPE.kv_heads * SHAPE.width * 2 / READ * 1e6
    name = "decode" if segment == 1 else f"verify {segment}"
    return [
        Result(f"{name} attention + small", rows, context, pair, floor),
        Result(f"{name} attention alone", rows, context, pair - alone, floor),
    ]


def prefill(rows: int, context: int, cut: ChunkCut | None = None) -> list[Result]:
    """Prefill attention of a layer."""
    gqa, where = layer(cut=cut), places(1, rows, context, False)
    held, qkv = pools(where, 2), projected(rows)
    spent = timed(lambda i: gqa(qkv, where, *held[i % 2], NARROW), 4, 5)
    pairs = rows * context + rows * (rows + 1) // 2
    floor = 4 * SHAPE.kv_heads * SHAPE.share * SHAPE.width * pairs / MULTIPLY * 1e6
    return [Result("prefill attention", rows, context, spent, floor)]


def small_kernels() -> list[Result]:
    """Norms and token choice."""
    results = []
    weight = torch.ones(HIDDEN, device=DEVICE, dtype=NARROW)
    for rows in (1, 4, 16, 64, 8192):
        residual, parts = torch.randn(rows, HIDDEN, device=DEVICE), torch.zeros(3, rows, HIDDEN, device=DEVICE)
        spent = timed(lambda _, r=residual, p=parts: residual_norm(r, p, weight, 1e-5, NARROW), 40)
        results.append(Result("residual_norm, 3 parts", rows, 0, spent, rows * HIDDEN * 22 / READ * 1e6))
        spent = timed(lambda _, r=residual: rms_norm(r, weight, 1e-5, NARROW), 40)
        results.append(Result("rms_norm", rows, 0, spent, rows * HIDDEN * 6 / READ * 1e6))
    for rows in (1, 16, 64):
        logits = torch.randn(rows, VOCAB, device=DEVICE)
        floor = rows * VOCAB * 4 / READ * 1e6
        results.append(Result("greedy", rows, 0, timed(lambda _, x=logits: greedy(x), 20), floor))
        results.append(Result("candidates", rows, 0, timed(lambda _, x=logits: candidates(x), 10), floor))
        results.append(Result("torch max", rows, 0, timed(lambda _, x=logits: x.max(1), 20), floor))
    return results


def report(results: list[Result]) -> None:
    """A table of every result."""
    print(f"{'kernel':26} {'rows':>5} {'context':>8} {'µs':>9} {'floor':>8} {'above':>8}")
    for r in results:
        above = r.microseconds - r.floor
        print(f"{r.name:26} {r.rows:5} {r.context:8} {r.microseconds:9.2f} {r.floor:8.2f} {above:8.2f}")


def variants(rows: list[int], contexts: list[int]) -> None:
    """Decode attention alone, microseconds, by kernel, warps x strips, registers and programs a row and head."""
    figures = [(m, c) for m in rows for c in contexts]
    print("rows x context:", ", ".join(f"{m}x{c}" for m, c in figures))
    tried = ((4, 1, 168, False), (4, 1, None, True), (4, 2, 168, True), (4, 2, None, True))
    for warps, least, registers, fetch in (*tried, (8, 1, 128, False)):
        for spread in (1, 2, 4, 8, 16, 32):
            choice = DecodeChoice("strips", warps, least, registers, fetch, spread)
            spent = [decode(m, c, choice=choice)[1].microseconds for m, c in figures]
            name = f"strips {warps}x{least} registers {registers} {'fetch' if fetch else '     '} spread {spread:2}:"
            print(name, *(f"{us:7.2f}" for us in spent))
    for spread in (2, 8, 32):
        spent = [decode(m, c, choice=DecodeChoice("tiles", spread=spread))[1].microseconds for m, c in figures]
        print(f"tiles spread {spread:2}:", *(f"{us:7.2f}" for us in spent))


def cuts(rows: list[int]) -> None:
    """Prefill attention, microseconds, by the cut of its second kernel."""
    print("rows:", rows)
    tried = (
        ChunkCut(128, 64, 8, 3, False), ChunkCut(128, 64, 8, 3, True), ChunkCut(128, 64, 8, 2, True),
        ChunkCut(128, 64, 4, 2, True), ChunkCut(128, 64, 4, 3, True), ChunkCut(128, 128, 8, 2, False),
        ChunkCut(128, 128, 8, 3, False), ChunkCut(64, 64, 4, 2, True), ChunkCut(64, 128, 4, 2, False),
        ChunkCut(256, 64, 8, 2, True),
    )  # fmt: skip
    for cut in tried:
        print(cut, *(f"{prefill(m, 0, cut)[0].microseconds:9.1f}" for m in rows))


@click.command()
@click.option("--rows", default="1,4,8,16", help="Row counts of decode steps.")
@click.option("--contexts", default="400,1000,16000", help="Cached tokens of decode steps.")
@click.option("--prefill-rows", default="2048,8192", help="Row counts of prefill chunks; empty for none.")
@click.option("--variants", "tried", is_flag=True, help="Only attention, every way to cut it.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(rows: str, contexts: str, prefill_rows: str, tried: bool, path: Path | None) -> None:
    """Measure attention and small kernels on this GPU."""
    compile_all(MODULES, [capability(DEVICE)])
    counts, lengths = [int(m) for m in rows.split(",")], [int(c) for c in contexts.split(",")]
    if tried:
        cuts([int(m) for m in prefill_rows.split(",") if m])
        variants(counts, lengths)
        return
    results = [result for m in counts for c in lengths for result in decode(m, c)]
    results += decode(16, lengths[0], 2)
    results += [result for m in prefill_rows.split(",") if m for result in prefill(int(m), 0)]
    results += small_kernels()
    report(results)
    if path:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        card = torch.cuda.get_device_name()
        path.write_text(
            json.dumps({"card": card, "versions": versions, "results": [structs.asdict(r) for r in results]})
        )


if __name__ == "__main__":
    main()
