"""Window attention with sinks and values narrower than keys, against softmax written out; rows below position zero."""

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.formats.cache_rows import decode_fp8_rows, encode_fp8_rows, pack_fp8_rows, unpack_fp8_rows
from dgpp_core.layers.window import Read, window_attend
from dgpp_core.ops.tile_attention import tile_attention

HEADS, KV_HEADS, WIDTH, VALUE, LENGTH, STEP = 8, 2, 24, 16, 300, 4
SCALE = WIDTH**-0.5


class Layer:
    """One request's rows and its rings; ``run`` gives the outputs of some steps."""

    def __init__(self, window: int, sinks: Tensor | None, read: Read | None = None) -> None:
        source = torch.Generator().manual_seed(8)
        self.window, self.sinks, self.read = window, sinks, read
        self.q = torch.randn(LENGTH, HEADS, WIDTH, generator=source)
        self.k = torch.randn(LENGTH, KV_HEADS, WIDTH, generator=source)
        self.v = torch.randn(LENGTH, KV_HEADS, VALUE, generator=source)
        self.k_ring = torch.randn(2, KV_HEADS, window + STEP, WIDTH, generator=source)
        self.v_ring = torch.randn(2, KV_HEADS, window + STEP, VALUE, generator=source)

    def run(self, counts: list[int], *, keep: bool = False, first: int = 0) -> Tensor:
        """Steps of so many rows, the first of all at position ``first``."""
        outs, row = [], 0
        for n in counts:
            at = torch.arange(row, row + n)
            batch = StepBatch(
                tokens=at, positions=at + first, counts=(n,), slots=torch.tensor([1]),
                lengths=torch.tensor([row + first]), block_tables=torch.zeros(1, 1, dtype=torch.int64),
                candidates=torch.tensor([0]), keep_rows=keep, max_length=row + n,
            )  # fmt: skip
            rows = self.q[at], self.k[at], self.v[at], self.k_ring, self.v_ring
            given = {"window": self.window, "scale": SCALE}
            outs.append(window_attend(batch, *rows, sinks=self.sinks, read=self.read, **given))
            row += n
        return torch.cat(outs)

    def written_out(self, row: int, head: int, first: int = 0) -> Tensor:
        """One row of one head in float64: softmax over its window's keys and the sink."""
        kv, keys = head // (HEADS // KV_HEADS), slice(max(0, -first, row - self.window + 1), row + 1)
        scores = self.k[keys, kv].double() @ self.q[row, head].double() * SCALE
        sink = -torch.inf if self.sinks is None else self.sinks[head].item()
        weights = torch.softmax(torch.cat((scores, torch.tensor([sink], dtype=torch.float64))), 0)
        return weights[:-1] @ self.v[keys, kv].double()


SINKS = torch.linspace(-2, 3, HEADS)


@pytest.mark.parametrize("window", [16, 128])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["without", "with"])
def test_equals_softmax_over_the_window_and_the_sink(window: int, sinks: Tensor | None) -> None:
    layer = Layer(window, sinks)
    out = layer.run([LENGTH])
    assert out.shape == (LENGTH, HEADS, VALUE)
    for row in (0, 1, window - 2, window - 1, window, window + 1, 255, 299):
        for head in range(HEADS):
            assert torch.allclose(out[row, head].double(), layer.written_out(row, head), rtol=1e-4, atol=1e-6)


def test_every_way_through_gives_the_same_bits() -> None:
    whole = Layer(40, SINKS).run([LENGTH])
    assert torch.equal(Layer(40, SINKS).run([1, 63, 2, 64, 7, 163]), whole)
    assert torch.equal(Layer(40, SINKS).run([1] * LENGTH, keep=True), whole)
    assert torch.equal(Layer(40, SINKS).run([STEP] * (LENGTH // STEP), keep=True), whole)


def test_the_window_counts_the_row_itself() -> None:
    """Row 127 is the last that sees key 0 through a window of 128."""
    one, other = Layer(128, SINKS), Layer(128, SINKS)
    other.v[0] += 100
    moved = (one.run([LENGTH]) != other.run([LENGTH])).flatten(1).any(1)
    assert moved.nonzero().flatten().tolist() == list(range(128))


def test_extreme_sinks() -> None:
    plain = Layer(40, None).run([LENGTH])
    assert torch.equal(Layer(40, torch.full((HEADS,), -1e4)).run([LENGTH]), plain), "a sink that nothing falls into"
    assert not Layer(40, torch.full((HEADS,), 1e4)).run([LENGTH]).any(), "a sink that takes everything"
    one = SINKS.clone()
    one[5] += 1
    moved = (Layer(40, one).run([LENGTH]) != Layer(40, SINKS).run([LENGTH])).any(-1).any(0)
    assert moved.nonzero().flatten().tolist() == [5], "a sink is its head's alone"


@pytest.mark.parametrize("first", [-1, -2, -3])
def test_rows_below_position_zero_see_nothing_and_are_not_seen(first: int) -> None:
    layer = Layer(40, SINKS)
    whole = layer.run([LENGTH], first=first)
    assert not whole[:-first].any()
    for row in (-first, -first + 1, 39, 60, 299):
        for head in range(HEADS):
            wanted = layer.written_out(row, head, first)
            assert torch.allclose(whole[row, head].double(), wanted, rtol=1e-4, atol=1e-6)
    assert torch.equal(Layer(40, SINKS).run([1] * LENGTH, keep=True, first=first), whole)
    assert torch.equal(Layer(40, SINKS).run([1, 1, 1, 97, 200], first=first), whole)
    assert torch.equal(Layer(40, SINKS).run([STEP] * (LENGTH // STEP), keep=True, first=first), whole)


def test_a_row_with_a_sink_has_the_same_bits_alone() -> None:
    source = torch.Generator().manual_seed(2)
    q = torch.randn(3, 5, HEADS, WIDTH, generator=source)
    k = torch.randn(3, 4, KV_HEADS, 8, WIDTH, generator=source)
    v = torch.randn(3, 4, KV_HEADS, 8, VALUE, generator=source)
    visible = torch.arange(32).view(1, 4, 1, 8) <= torch.randint(0, 32, (3, 1, 5, 1), generator=source)
    whole = tile_attention(q, k, v, visible, SCALE, SINKS)
    for b in range(3):
        one = slice(b, b + 1)
        for row in range(5):
            own = slice(row, row + 1)
            alone = tile_attention(q[one, own], k[one], v[one], visible[one, :, own], SCALE, SINKS)
            assert torch.equal(alone[0, 0], whole[b, row])


def test_rows_in_eight_bits_are_read_as_they_are_stored() -> None:
    """A row's own key too, so that it is the same in a chunk, alone, and out of the ring."""
    plain = Layer(40, SINKS)
    plain.k, plain.v = (decode_fp8_rows(*encode_fp8_rows(x)) for x in (plain.k, plain.v))
    wanted = plain.run([LENGTH])
    for counts, keep in (([LENGTH], False), ([1, 63, 2, 64, 7, 163], False), ([STEP] * (LENGTH // STEP), True)):
        layer = Layer(40, SINKS, read=unpack_fp8_rows)
        layer.k, layer.v = pack_fp8_rows(layer.k), pack_fp8_rows(layer.v)
        layer.k_ring, layer.v_ring = pack_fp8_rows(layer.k_ring), pack_fp8_rows(layer.v_ring)
        assert layer.k_ring.dtype == torch.uint8
        assert layer.k_ring.shape[-1] == WIDTH + 4
        assert torch.equal(layer.run(counts, keep=keep), wanted)
    assert not torch.equal(Layer(40, SINKS).run([LENGTH]), wanted)
    assert not unpack_fp8_rows(torch.zeros(2, WIDTH + 4, dtype=torch.uint8)).any()
