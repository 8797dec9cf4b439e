"""Attention on a GPU: near float64, and a row's bits its own whatever stands beside it."""

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is there on Linux only")

from dgpp_core.layers.paged import PagedIndex
from dgpp_core.ops.kernels.attention import CudaGqa, DecodeChoice
from dgpp_core.ops.kernels.attention_prefill import ChunkCut
from dgpp_core.ops.kernels.heads import HeadShape
from dgpp_core.testing.attention import Layer, Step, error, expected, finished_heads, random_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
GPU = torch.device("cuda")
NARROW = torch.bfloat16
TOLERANCE = 6e-3
"""Of bfloat16 queries, probabilities and results."""
CONTEXTS = (0, 1, 63, 64, 65, 400, 2047, 2048, 5000)

SHAPES = {
    "GLM-4.7": HeadShape(8, 12, 128, 64, 64, True, True),
    "GLM-4.7 of four": HeadShape(2, 12, 128, 64, 64, True, True),
    "Llama": HeadShape(3, 3, 64, 64, 64, False, False),
    "tiny": HeadShape(2, 2, 16, 16, 16, False, True),
    "one head, small blocks": HeadShape(1, 4, 32, 16, 32, True, False),
    "large blocks": HeadShape(2, 8, 128, 128, 128, False, False),
    "wide": HeadShape(2, 8, 256, 64, 64, False, True),
    "not a power of two": HeadShape(2, 4, 80, 80, 64, True, False),
}


def layer_of(
    shape: HeadShape, choice: DecodeChoice | None = None, cut: ChunkCut | None = None
) -> tuple[Layer, CudaGqa]:
    layer = Layer.random(shape, GPU, 6000, NARROW)
    heads = shape.kv_heads * shape.share
    gqa = CudaGqa(
        heads, shape.kv_heads, shape.width, layer.scale,
        bias=layer.bias, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=layer.eps, rope=layer.rope,
        choice=choice, cut=cut,
    )  # fmt: skip
    return layer, gqa


def run(gqa: CudaGqa, step: Step) -> Tensor:
    """Rows of the step; its pools are written."""
    index = PagedIndex(step.batch, step.k_pool.shape[2])
    return gqa(step.qkv, index, step.k_pool, step.v_pool, NARROW)


def check_written(layer: Layer, before: Step, after: Step) -> None:
    """The step's own rows are in the pools, and nothing else changed."""
    block, offset = before.places()
    for old, new, rows in zip(
        (before.k_pool, before.v_pool), (after.k_pool, after.v_pool), finished_heads(layer, before)[1:], strict=True
    ):
        assert error(new[block, :, offset].flatten(1), rows.flatten(1)) < TOLERANCE
        kept = new.clone()
        kept[block, :, offset] = old[block, :, offset]
        assert torch.equal(kept.view(torch.int16), old.view(torch.int16))


@pytest.mark.parametrize("segment", [1, 2, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_decode_is_near_float64(name: str, segment: int) -> None:
    layer, gqa = layer_of(SHAPES[name])
    step = random_step(SHAPES[name], CONTEXTS, [segment] * len(CONTEXTS), GPU, NARROW, keep_rows=True)
    mine = step.copy()
    assert error(run(gqa, mine), expected(layer, step)) < TOLERANCE
    check_written(layer, step, mine)


@pytest.mark.parametrize("name", ["GLM-4.7", "Llama"])
def test_the_kernel_for_any_shape_takes_these_too(name: str) -> None:
    layer, gqa = layer_of(SHAPES[name], DecodeChoice("tiles"))
    step = random_step(SHAPES[name], CONTEXTS, [2] * len(CONTEXTS), GPU, NARROW, keep_rows=True)
    mine = step.copy()
    assert error(run(gqa, mine), expected(layer, step)) < TOLERANCE
    check_written(layer, step, mine)


@pytest.mark.parametrize("kernel", ["strips", "tiles"])
def test_the_number_of_programs_changes_no_bit(kernel: str) -> None:
    shape = SHAPES["GLM-4.7"]
    step = random_step(shape, CONTEXTS, [2] * len(CONTEXTS), GPU, NARROW, keep_rows=True)
    found = [run(layer_of(shape, DecodeChoice(kernel, spread=spread))[1], step.copy()) for spread in (1, 3, 8, 32)]
    assert all(torch.equal(other, found[0]) for other in found[1:])


def some_segments(step: Step, segments: Sequence[int]) -> Step:
    """The step of some one-row segments."""
    batch, chosen = step.batch, torch.tensor(segments, device=GPU)
    return msgspec.structs.replace(
        step,
        qkv=step.qkv[chosen],
        batch=msgspec.structs.replace(
            batch, tokens=batch.tokens[chosen], positions=batch.positions[chosen], counts=(1,) * len(segments),
            slots=batch.slots[chosen], lengths=batch.lengths[chosen], block_tables=batch.block_tables[chosen],
            candidates=batch.candidates[chosen],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["GLM-4.7", "large blocks", "tiny"])
def test_a_row_has_the_same_bits_in_every_batch(name: str) -> None:
    shape = SHAPES[name]
    _, gqa = layer_of(shape)
    contexts = [(37 * i * i) % 700 for i in range(63)] + [4000]
    step = random_step(shape, contexts, [1] * 64, GPU, NARROW, keep_rows=True)
    whole = run(gqa, step.copy())
    assert not whole.isnan().any()
    alone = torch.cat([run(gqa, some_segments(step, [i]).copy()) for i in range(64)])
    assert torch.equal(alone, whole)
    for rows in range(2, 64):
        chosen = [(5 * rows + 3 * i) % 64 for i in range(rows)]
        assert torch.equal(run(gqa, some_segments(step, chosen).copy()), whole[chosen]), rows


@pytest.mark.parametrize("segment", [2, 4, 6])
@pytest.mark.parametrize("name", ["GLM-4.7", "Llama", "large blocks", "tiny"])
def test_verify_rows_have_the_bits_of_plain_rows(name: str, segment: int) -> None:
    shape = SHAPES[name]
    _, gqa = layer_of(shape)
    contexts = [0, 61, 62, 63, 64, 400, 2044, 2046, 4094]
    step = random_step(shape, contexts, [segment] * len(contexts), GPU, NARROW, keep_rows=True)
    verified, plain = step.copy(), step.copy()
    together = run(gqa, verified).view(len(contexts), segment, -1)
    for r in range(segment):
        rows = [s * segment + r for s in range(len(contexts))]
        part = msgspec.structs.replace(
            some_segments(msgspec.structs.replace(plain, batch=_rows_as_segments(plain, segment)), rows),
            k_pool=plain.k_pool, v_pool=plain.v_pool,
        )  # fmt: skip
        assert torch.equal(run(gqa, part), together[:, r]), r
    assert torch.equal(plain.k_pool.view(torch.int16), verified.k_pool.view(torch.int16))
    assert torch.equal(plain.v_pool.view(torch.int16), verified.v_pool.view(torch.int16))


def _rows_as_segments(step: Step, segment: int) -> msgspec.Struct:
    """The batch with every row a segment of its own."""
    batch = step.batch
    each = torch.arange(len(batch.counts), device=GPU).repeat_interleave(segment)
    return msgspec.structs.replace(
        batch, counts=(1,) * len(each), slots=batch.slots[each], lengths=batch.positions,
        block_tables=batch.block_tables[each], candidates=batch.candidates[each],
    )  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_is_near_float64(name: str) -> None:
    layer, gqa = layer_of(SHAPES[name])
    contexts, counts = [0, 0, 64, 1000, 2047], [1, 130, 63, 65, 3]
    step = random_step(SHAPES[name], contexts, counts, GPU, NARROW, keep_rows=False)
    mine = step.copy()
    assert error(run(gqa, mine), expected(layer, step)) < TOLERANCE
    check_written(layer, step, mine)


def test_whole_blocks_by_descriptor_change_no_bit() -> None:
    shape = SHAPES["GLM-4.7"]
    step = random_step(shape, [0, 64, 1000], [300, 129, 65], GPU, NARROW, keep_rows=False)
    found = [
        run(layer_of(shape, cut=ChunkCut(lines, 64, warps, 2, whole))[1], step.copy())
        for lines, warps, whole in ((128, 8, False), (128, 8, True), (128, 4, True), (64, 4, False))
    ]
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("name", ["GLM-4.7", "Llama", "tiny"])
def test_a_prompt_has_the_same_bits_in_chunks(name: str) -> None:
    shape = SHAPES[name]
    _, gqa = layer_of(shape)
    step = random_step(shape, [100], [700], GPU, NARROW, keep_rows=False)
    whole_step = step.copy()
    whole = run(gqa, whole_step)
    for size in (1, 7, 64, 130, 333):
        chunked, end = step.copy(), 12 if size == 1 else 700
        cuts = [slice(first, min(first + size, end)) for first in range(0, end, size)]
        found = torch.cat([run(gqa, chunked.part(rows, 0, keep_rows=False)) for rows in cuts])
        assert torch.equal(found, whole[:end]), size
    assert torch.equal(chunked.k_pool.view(torch.int16), whole_step.k_pool.view(torch.int16))


def test_a_prompt_has_the_same_bits_beside_others() -> None:
    shape = SHAPES["GLM-4.7"]
    _, gqa = layer_of(shape)
    contexts, counts = [0, 64, 1000], [300, 129, 65]
    step = random_step(shape, contexts, counts, GPU, NARROW, keep_rows=False)
    together, row = run(gqa, step.copy()), 0
    for segment, count in enumerate(counts):
        rows = slice(row, row + count)
        assert torch.equal(run(gqa, step.part(rows, segment, keep_rows=False).copy()), together[rows])
        row += count


def test_a_captured_step_repeats() -> None:
    shape = SHAPES["GLM-4.7"]
    _, gqa = layer_of(shape)
    step = random_step(shape, [400, 5, 3000], [2] * 3, GPU, NARROW, keep_rows=True)
    index = PagedIndex(step.batch, shape.block)
    eager = gqa(step.qkv, index, step.k_pool, step.v_pool, NARROW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gqa(step.qkv, index, step.k_pool, step.v_pool, NARROW)
    for _ in range(5):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


def test_inert_segments_do_no_harm() -> None:
    shape = SHAPES["GLM-4.7"]
    _, gqa = layer_of(shape)
    step = random_step(shape, [90, 0, 0], [2] * 3, GPU, NARROW, keep_rows=True)
    live = run(gqa, step.copy())[:2]
    step.batch.block_tables[1:] = 0
    step.batch.positions[2:] = 0
    assert torch.equal(run(gqa, step.copy())[:2], live)
