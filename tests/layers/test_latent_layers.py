"""Latent attention and the choice of its keys, against the equations and by every way through a text."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import ConfigError, StepBatch
from dgpp_core.formats.latent_layout import latent_layout
from dgpp_core.formats.latent_rows import decode_latent_rows, encode_latent_rows
from dgpp_core.layers.mla import LatentAttention
from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.layers.sparse_index import SparseIndexer, top_keys
from dgpp_core.ops.rope import RotaryTable

LENGTH, BLOCK, HEADS, NOPE, TURNED, VALUE, RANK = 75, 16, 5, 24, 8, 12, 40
INDEX_HEADS, INDEX_WIDTH, TOP_K, EPS, THETA = 3, 16, 20, 1e-5, 1000.0


class Rig:
    """One layer with random weights; two requests with texts of their own."""

    def __init__(self, *, rank: int = RANK, turned: int = TURNED, block: int = BLOCK, kv_dtype: str = "bf16") -> None:
        torch.manual_seed(6)
        self.rank, self.turned, self.block, self.blocks = rank, turned, block, -(-LENGTH // block)
        self.q = torch.randn(2, LENGTH, HEADS * (NOPE + turned))
        self.latent = torch.randn(2, LENGTH, rank + turned)
        self.index_q, self.index_k = (
            torch.randn(2, LENGTH, INDEX_HEADS * INDEX_WIDTH),
            torch.randn(2, LENGTH, INDEX_WIDTH),
        )
        self.gates = torch.randn(2, LENGTH, INDEX_HEADS)
        self.expand, self.norm = torch.randn(HEADS * (NOPE + VALUE), rank) * 0.3, torch.rand(rank) + 0.5
        self.key_norm, self.key_bias = torch.rand(INDEX_WIDTH) + 0.5, torch.randn(INDEX_WIDTH)
        layout = latent_layout(kv_dtype, rank, turned)
        dtype = torch.uint8 if layout.dtype == "uint8" else torch.float32
        self.pool = torch.zeros(1 + 2 * self.blocks, 1, block, layout.width, dtype=dtype)
        self.keys = torch.zeros(1 + 2 * self.blocks, 1, block, INDEX_WIDTH)
        rope = RotaryTable(turned, LENGTH, THETA, torch.device("cpu")) if turned else None
        self.scale = (NOPE + turned) ** -0.5
        self.attention = LatentAttention(
            self.expand, self.norm, heads=HEADS, nope=NOPE, scale=self.scale, eps=EPS, rope=rope
        )
        self.indexer = SparseIndexer(
            INDEX_HEADS, INDEX_WIDTH, TOP_K, key_norm=self.key_norm, key_bias=self.key_bias, eps=1e-6, rope=rope
        )
        self.lengths = [0, 0]
        self.out: list[list[Tensor]] = [[], []]
        self.seen: list[list[Tensor]] = [[], []]

    def step(self, rows: dict[int, int], *, keep: bool, sparse: bool = True) -> None:
        """Some rows of some requests."""
        starts, counts = [self.lengths[s] for s in rows], tuple(rows.values())
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
        batch = StepBatch(
            tokens=positions, positions=positions, counts=counts, slots=torch.tensor(list(rows)),
            lengths=torch.tensor(starts),
            block_tables=torch.tensor([[1 + s * self.blocks + b for b in range(self.blocks)] for s in rows]),
            candidates=torch.zeros(len(rows), dtype=torch.int64), keep_rows=keep,
            max_length=max(a + n for a, n in zip(starts, counts, strict=True)),
        )  # fmt: skip
        index = PagedIndex(batch, self.block)

        def taken(x: Tensor) -> Tensor:
            return torch.cat([x[s, a : a + n] for s, a, n in zip(rows, starts, counts, strict=True)])

        chosen: Selection | None = None
        if sparse:
            inputs = (taken(self.index_q), taken(self.index_k), taken(self.gates))
            chosen = self.indexer(*inputs, index, self.keys, torch.float32)
        out = self.attention(taken(self.q), taken(self.latent), index, self.pool, torch.float32, chosen=chosen)
        sets = [row for mask in chosen or () for row in mask.transpose(1, 2).flatten(0, 1).flatten(1)]
        for s, part, at in zip(
            rows, torch.split(out, list(counts)), torch.split(torch.arange(len(out)), list(counts)), strict=True
        ):
            self.out[s].append(part)
            self.seen[s] += [F.pad(sets[i], (0, LENGTH + BLOCK))[:LENGTH] for i in at.tolist() if sets]
            self.lengths[s] += len(part)


def turn(x: Tensor, width: int) -> Tensor:
    """Neighbouring dimensions of the first ``width`` as complex numbers, by rows' positions; ``[T, heads, D]``."""
    speeds = THETA ** (-torch.arange(0, width, 2).double() / max(width, 1))
    spin = torch.polar(torch.ones(1).double(), torch.arange(len(x)).double()[:, None] * speeds)[:, None]
    turned = torch.view_as_real(torch.view_as_complex(x[..., :width].reshape(*x.shape[:2], -1, 2)) * spin)
    return torch.cat((turned.flatten(-2), x[..., width:]), -1)


def scores(rig: Rig, slot: int) -> Tensor:
    """Of the indexer, ``[T, T]``, float64."""
    q = rig.index_q[slot].double().view(LENGTH, INDEX_HEADS, -1)
    k = F.layer_norm(rig.index_k[slot].double(), (INDEX_WIDTH,), rig.key_norm.double(), rig.key_bias.double(), 1e-6)
    if rig.turned:
        q, k = turn(q, rig.turned), turn(k[:, None], rig.turned)[:, 0]
    dots = torch.relu(torch.einsum("thd,sd->hts", q, k) * INDEX_WIDTH**-0.5)
    return torch.einsum("th,hts->ts", rig.gates[slot].double() * INDEX_HEADS**-0.5, dots)


def chosen_sets(rig: Rig, slot: int) -> Tensor:
    """By sorting every row's keys by score and position in Python."""
    found, table = torch.zeros(LENGTH, LENGTH, dtype=torch.bool), scores(rig, slot).tolist()
    for row in range(LENGTH):
        order = sorted(range(row + 1), key=lambda at: (-table[row][at], at))
        found[row, order[:TOP_K]] = True
    return found


def expanded(rig: Rig, slot: int, seen: Tensor, *, normed: bool = False) -> Tensor:
    """The attention with keys and values made of every latent, ``[T, heads * value]``, float64."""
    latent = rig.latent[slot, :, : rig.rank].double()
    if not normed:
        latent = F.rms_norm(latent, (rig.rank,), rig.norm.double(), EPS)
    parts = torch.einsum("hdk,tk->thd", rig.expand.double().view(HEADS, -1, rig.rank), latent)
    key, value = torch.split(parts, [NOPE, VALUE], -1)
    q = rig.q[slot].double().view(LENGTH, HEADS, -1)
    if rig.turned:
        shared = turn(rig.latent[slot, :, None, rig.rank :].double(), rig.turned).expand(-1, HEADS, -1)
        key, q = torch.cat((key, shared), -1), torch.cat((q[..., :NOPE], turn(q[..., NOPE:], rig.turned)), -1)
    logits = torch.einsum("thd,shd->hts", q, key) * rig.scale
    return torch.einsum("hts,shd->thd", logits.masked_fill(~seen, -torch.inf).softmax(-1), value).flatten(1)


@pytest.mark.parametrize("turned", [TURNED, 0])
def test_the_absorbed_form_equals_the_expanded_one(turned: int) -> None:
    rig, causal = Rig(turned=turned), torch.ones(LENGTH, LENGTH).tril().bool()
    rig.step({1: LENGTH}, keep=False, sparse=False)
    wanted = expanded(rig, 1, causal)
    assert torch.allclose(torch.cat(rig.out[1]).double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turned", [TURNED, 0])
def test_the_chosen_keys_and_the_attention_to_them(turned: int) -> None:
    rig = Rig(turned=turned)
    rig.step({0: LENGTH}, keep=False)
    wanted = chosen_sets(rig, 0)
    assert torch.equal(torch.stack(rig.seen[0]), wanted)
    assert wanted.sum(1).tolist() == [min(row + 1, TOP_K) for row in range(LENGTH)]
    out = torch.cat(rig.out[0]).double()
    assert torch.allclose(out, expanded(rig, 0, wanted), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out, expanded(rig, 0, torch.ones(LENGTH, LENGTH).tril().bool()), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("rank", "block", "kv_dtype"),
    [(RANK, BLOCK, "bf16"), (512, 64, "bf16"), (RANK, 1, "bf16"), (RANK, BLOCK, "fp8"), (64, BLOCK, "fp4")],
)
def test_every_way_through_gives_the_same_bits(rank: int, block: int, kv_dtype: str) -> None:
    whole = Rig(rank=rank, block=block, kv_dtype=kv_dtype)
    whole.step({0: LENGTH}, keep=False)
    for keep in (False, True):
        other = Rig(rank=rank, block=block, kv_dtype=kv_dtype)
        for count in (1, 14, 33, 3):
            other.step({0: count, 1: 1 + count // 2}, keep=False)
        while other.lengths[0] < LENGTH:
            other.step({0: 4, 1: 4}, keep=keep)
            other.step({0: 2}, keep=keep)
        assert torch.equal(torch.cat(other.out[0]), torch.cat(whole.out[0]))
        assert torch.equal(torch.stack(other.seen[0])[:, :LENGTH], torch.stack(whole.seen[0]))


def test_ties_go_to_the_lower_position() -> None:
    levels = torch.randint(3, (2, 5, 7, 4), generator=torch.Generator().manual_seed(8)).float() - 1
    visible = torch.rand(2, 5, 7, 4, generator=torch.Generator().manual_seed(9)) < 0.8
    found = top_keys(levels, visible, 6)
    for b in range(2):
        for row in range(7):
            score, may = levels[b, :, row].flatten().tolist(), visible[b, :, row].flatten().tolist()
            order = sorted((at for at in range(20) if may[at]), key=lambda at: (-score[at], at))
            assert found[b, :, row].flatten().nonzero().flatten().tolist() == sorted(order[:6])


def stored(rig: Rig, kv_dtype: str) -> None:
    """Replace the rig's latents with what is left of them in the cache, row by row of the formats' definition."""
    latent = F.rms_norm(rig.latent[..., : rig.rank], (rig.rank,), rig.norm, EPS)
    rows = latent.flatten(0, 1)
    for at, row in enumerate(rows):
        amax = row.abs().max()
        if kv_dtype == "fp8":
            rows[at] = (row * (448 / amax)).to(torch.float8_e4m3fn).float() * (amax / 448)
            continue
        levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
        for start in range(0, rig.rank, 16):
            part = row[start : start + 16]
            block = (part.abs().max() * (448 / amax)).to(torch.float8_e4m3fn).float()
            step = block * (amax / (6 * 448))
            near = (part.abs()[:, None] / step - levels).abs().argmin(1)
            rows[at, start : start + 16] = levels[near] * step * part.sign()
    rig.latent[..., : rig.rank] = latent


@pytest.mark.parametrize(("kv_dtype", "width"), [("fp8", 64 + 4 + 16), ("fp4", 32 + 4 + 4 + 16)])
def test_attention_to_rows_as_they_are_stored(kv_dtype: str, width: int) -> None:
    """The key that heads share is kept in bfloat16, the latent in fewer bits; the step's own rows are read back."""
    rig, causal = Rig(rank=64, kv_dtype=kv_dtype), torch.ones(LENGTH, LENGTH).tril().bool()
    rig.latent[..., 64:] = 0  # the shared key: what is left of it is asked below
    rig.step({0: LENGTH}, keep=False, sparse=False)
    assert rig.pool.shape[-1] == width
    exact = expanded(rig, 0, causal)
    stored(rig, kv_dtype)
    out = torch.cat(rig.out[0]).double()
    wanted = expanded(rig, 0, causal, normed=True)
    assert torch.allclose(out, wanted, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(out, exact, rtol=1e-3, atol=1e-3)


def test_the_shared_key_is_kept_in_bfloat16() -> None:
    layout = latent_layout("fp8", 64, 8)
    latent, key = torch.randn(3, 64), torch.randn(3, 8)
    rows = encode_latent_rows(layout, latent, key)
    assert rows.shape == (3, layout.width)
    assert torch.equal(decode_latent_rows(layout, rows)[:, 64:], key.bfloat16().float())


@pytest.mark.parametrize(("kind", "rank"), [("fp4", 40), ("fp8", 6), ("int8", 64)])
def test_latents_that_cannot_be_stored_so_are_refused(kind: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="kv_dtype"):
        latent_layout(kind, rank, 8)


def test_bytes_of_a_row() -> None:
    """Of a latent of 512 and a key of 64: those that the formats of a cache are known for."""
    widths = [latent_layout(kind, 512, 64).width for kind in ("fp8", "fp4")]
    assert widths == [644, 420]
