"""The attention kernels in the interpreter, in float32: every shape of head, block and segment."""

from typing import Any

import pytest
import torch

from dgpp_core.ops.kernels import attention_decode, attention_prefill
from dgpp_core.ops.kernels.attention_decode import PARTS, decode_attention, decode_meta
from dgpp_core.ops.kernels.attention_prefill import (
    chunk_attention,
    chunk_cut,
    chunk_meta,
    chunk_work,
    place_meta,
    place_rows,
    place_tiles,
)
from dgpp_core.ops.kernels.heads import HeadShape
from dgpp_core.testing.attention import Layer, Step, error, expected, finished_heads, random_step

CPU = torch.device("cpu")
LOG2E = 1.4426950408889634
COMPILER = ("launch_pdl", "num_warps", "maxnreg")

SHAPES = {
    "glm": HeadShape(kv_heads=2, share=12, width=32, rotated=16, block=64, biased=True, normed=True),
    "llama": HeadShape(kv_heads=1, share=3, width=16, rotated=16, block=16, biased=False, normed=False),
    "bare": HeadShape(kv_heads=1, share=1, width=24, rotated=0, block=128, biased=True, normed=False),
    "odd rotation": HeadShape(kv_heads=1, share=2, width=32, rotated=24, block=32, biased=False, normed=True),
}


def vectors(layer: Layer, like: torch.Tensor) -> list[torch.Tensor]:
    tables = (None, None) if layer.rope is None else (layer.rope.cos, layer.rope.sin)
    return [like if v is None else v for v in (layer.bias, layer.q_norm, layer.k_norm, *tables)]


def options(meta: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {key: value for key, value in (meta | changed).items() if key not in COMPILER}


def decode(layer: Layer, step: Step, spread: int) -> torch.Tensor:
    shape, rows = layer.shape, len(step.qkv)
    segment = step.batch.counts[0]
    meta = decode_meta(shape, 90)
    lines = rows * shape.kv_heads
    out = torch.full((rows, shape.kv_heads * shape.share * shape.width), float("nan"))
    values = torch.full((lines * PARTS * shape.share * shape.width,), float("nan"))
    stats = torch.full((lines * PARTS * 2 * meta["HEADS"],), float("nan"))
    arrived = torch.zeros(lines, dtype=torch.int32)
    decode_attention[(lines, spread)](
        out, step.qkv, *vectors(layer, step.qkv), step.k_pool, step.v_pool, step.batch.block_tables,
        step.batch.positions, values, stats, arrived, step.batch.block_tables.shape[1], segment,
        layer.scale * LOG2E, layer.eps, **options(meta, PDL=False),
    )  # fmt: skip
    assert not arrived.any()
    return out


def prefill(layer: Layer, step: Step) -> torch.Tensor:
    shape, batch = layer.shape, step.batch
    out = torch.full((len(step.qkv), shape.kv_heads * shape.share * shape.width), float("nan"))
    q = torch.empty_like(out)
    place_rows[(len(q), place_tiles(shape))](
        q, step.qkv, *vectors(layer, step.qkv), step.k_pool, step.v_pool, *step.places(), batch.positions, layer.eps,
        **options(place_meta(shape)),
    )  # fmt: skip
    cut = chunk_cut(shape, 121)
    work = chunk_work(batch.counts, shape.share, cut.lines, CPU)
    chunk_attention[(shape.kv_heads, len(work))](
        out, q, step.k_pool, step.v_pool, step.k_pool, step.v_pool, batch.block_tables, batch.positions, work,
        batch.block_tables.shape[1], layer.scale * LOG2E, **options(chunk_meta(shape, cut)),
    )  # fmt: skip
    return out


def check_rows_are_written(layer: Layer, step: Step) -> None:
    block, offset = step.places()
    _, k, v = finished_heads(layer, step)
    assert error(step.k_pool[block, :, offset].flatten(1), k.flatten(1)) < 1e-6
    assert error(step.v_pool[block, :, offset].flatten(1), v.flatten(1)) < 1e-6


@pytest.mark.parametrize("segment", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_decode(name: str, segment: int) -> None:
    shape = SHAPES[name]
    layer = Layer.random(shape, CPU, 256, torch.float32)
    contexts = [0, 63, 150] if segment == 1 else [62, 127]
    step = random_step(shape, contexts, [segment] * len(contexts), CPU, torch.float32, keep_rows=True)
    wanted = expected(layer, step)
    mine = step.copy()
    assert error(decode(layer, mine, 2), wanted) < 2e-6
    check_rows_are_written(layer, mine)


def test_parts_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "PARTS", 4)
    monkeypatch.setattr(attention_decode, "MERGED", 2)
    shape = SHAPES["llama"]
    layer = Layer.random(shape, CPU, 1100, torch.float32)
    step = random_step(shape, [255, 256, 1000], [1] * 3, CPU, torch.float32, keep_rows=True)
    wanted = expected(layer, step)
    assert error(decode(layer, step.copy(), 4), wanted) < 2e-6
    assert error(decode(layer, step.copy(), 2), wanted) < 2e-6


@pytest.mark.parametrize("name", SHAPES)
def test_prefill(name: str) -> None:
    shape = SHAPES[name]
    layer = Layer.random(shape, CPU, 256, torch.float32)
    step = random_step(shape, [0, 70, 128], [33, 1, 20], CPU, torch.float32, keep_rows=False)
    wanted = expected(layer, step)
    assert error(prefill(layer, step), wanted) < 2e-6
    check_rows_are_written(layer, step)


def test_pieces_cover_every_line_once() -> None:
    counts, share = (1, 30, 7), 12
    pieces = attention_prefill.chunk_pieces(counts, share, 128)
    lines = [
        (segment, line) for segment, _, count, first in pieces for line in range(first, min(first + 128, count * share))
    ]
    assert sorted(lines) == [(segment, line) for segment, count in enumerate(counts) for line in range(count * share)]
    assert {segment: base for segment, base, _, _ in pieces} == {0: 0, 1: 1, 2: 31}
