"""The gated delta layer equals its equations and transformers' module, and has the same bits however it is fed."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.layers.convolution import causal_convolution
from dgpp_core.layers.gated_delta import GatedDeltaNet, delta_step
from dgpp_core.layers.history import with_history
from dgpp_core.ops.activation import silu, softplus
from dgpp_core.ops.fold import fold

KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, TAPS, LENGTH, STEP = 2, 6, 16, 12, 4, 60, 4
CHANNELS = 2 * KEY_HEADS * KEY_WIDTH + VALUE_HEADS * VALUE_WIDTH


class Rig:
    """Three requests of one layer, fed by `step`; outputs are collected in order of position."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(3)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source)

        self.conv, self.a_log = noise(CHANNELS, TAPS) / 2, noise(VALUE_HEADS) - 1
        self.dt_bias, self.norm = noise(VALUE_HEADS) - 1, 1 + 0.2 * noise(VALUE_WIDTH)
        self.qkv, self.z = noise(3, LENGTH, CHANNELS), noise(3, LENGTH, VALUE_HEADS * VALUE_WIDTH)
        self.a, self.b = noise(2, 3, LENGTH, VALUE_HEADS)
        self.layer = GatedDeltaNet(
            KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, conv=self.conv, a_log=self.a_log, dt_bias=self.dt_bias,
            norm=self.norm, eps=1e-6, gate="sigmoid",
        )  # fmt: skip
        # Dead rows of a ring hold what an earlier request left there.
        self.ring = torch.full((3, 1, TAPS - 1 + STEP, CHANNELS), 7.0)
        self.states = torch.zeros(3, STEP, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH)
        self.lengths, self.candidates = [0, 0, 0], [0, 0, 0]
        self.out: list[list[Tensor]] = [[], [], []]

    def batch(self, rows: dict[int, int], keep: bool) -> StepBatch:
        starts = [self.lengths[s] for s in rows]
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, rows.values(), strict=True)])
        return StepBatch(
            tokens=positions, positions=positions, counts=tuple(rows.values()), slots=torch.tensor(list(rows)),
            lengths=torch.tensor(starts), block_tables=torch.zeros(len(rows), 1, dtype=torch.int64),
            candidates=torch.tensor([self.candidates[s] for s in rows]), keep_rows=keep, max_length=LENGTH,
        )  # fmt: skip

    def step(self, rows: dict[int, int], *, keep: bool, accept: int | None = None) -> None:
        """Run some rows of some requests; a verify step (``keep``) commits ``accept`` of them."""
        batch = self.batch(rows, keep)

        def taken(x: Tensor) -> Tensor:
            return torch.cat([x[s, self.lengths[s] : self.lengths[s] + n] for s, n in rows.items()])

        out = self.layer(
            batch, taken(self.qkv), taken(self.z), taken(self.a), taken(self.b), self.ring, self.states, torch.float32
        )
        for s, part in zip(rows, torch.split(out, list(rows.values())), strict=True):
            done = rows[s] if accept is None else accept
            self.out[s].append(part[:done])
            self.lengths[s] += done
            self.candidates[s] = done - 1 if keep else 0


Fed = tuple[dict[int, int], bool, int | None]


def fed(*steps: Fed) -> Rig:
    rig = Rig()
    for rows, keep, accept in steps:
        rig.step(rows, keep=keep, accept=accept)
    return rig


def plain(rig: Rig, slot: int) -> Tensor:
    """The equations in float64, scalar decay by scalar decay, on a whole sequence."""
    u, w = rig.qkv[slot].double(), rig.conv.double()
    share, keys, rows = VALUE_HEADS // KEY_HEADS, KEY_HEADS * KEY_WIDTH, []
    memory = torch.zeros(VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, dtype=torch.float64)
    for t in range(LENGTH):
        c = sum((w[:, j] * u[t - TAPS + 1 + j] for j in range(TAPS) if t - TAPS + 1 + j >= 0), torch.zeros(CHANNELS))
        c = c / (1 + (-c).exp())
        out = []
        for h in range(VALUE_HEADS):
            at = h // share * KEY_WIDTH
            q, k = c[at : at + KEY_WIDTH], c[keys + at : keys + at + KEY_WIDTH]
            v = c[2 * keys + h * VALUE_WIDTH : 2 * keys + (h + 1) * VALUE_WIDTH]
            q, k = q / (q @ q + 1e-6).sqrt() / math.sqrt(KEY_WIDTH), k / (k @ k + 1e-6).sqrt()
            rise = math.log1p(math.exp(rig.a[slot, t, h].item() + rig.dt_bias[h].item()))
            memory[h] *= math.exp(-math.exp(rig.a_log[h].item()) * rise)
            error = (v - memory[h].T @ k) / (1 + math.exp(-rig.b[slot, t, h].item()))
            memory[h] += torch.outer(k, error)
            o = memory[h].T @ q
            o = o / (o.square().mean() + 1e-6).sqrt() * rig.norm.double()
            out.append(o * torch.sigmoid(rig.z[slot, t].double().view(VALUE_HEADS, -1)[h]))
        rows.append(torch.cat(out))
    return torch.stack(rows)


def test_equals_its_equations() -> None:
    rig = fed(({0: LENGTH}, False, None), ({1: LENGTH}, False, None))
    for slot in (0, 1):
        wanted = plain(rig, slot)
        found = torch.cat(rig.out[slot]).double()
        assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 1e-5


WAYS: dict[str, tuple[Fed, ...]] = {
    "one by one": (({1: 1}, True, None),) * LENGTH,
    "first chunk shorter than the history": (({1: 2}, False, None), ({1: 1}, False, None), ({1: 57}, False, None)),
    "chunks of 7": (*(({1: 7}, False, None),) * 8, ({1: 4}, False, None)),
    "in company": (({0: 20, 1: 33, 2: 5}, False, None), *(({0: 3, 1: 3, 2: 3}, True, None),) * 9),
    "company comes and goes": (
        ({0: 20, 1: 33}, False, None), *(({0: 1, 1: 1}, True, 1), ({1: 1}, True, 1)) * 13, ({1: 1}, True, None),
    ),
    "all drafts rejected": (({1: 30}, False, None), *(({1: 4, 2: 4}, True, 1),) * 27, ({1: 3}, True, None)),
    "some drafts rejected": (({1: 12}, False, None), *(({1: 4}, True, 3),) * 15, ({1: 3}, True, None)),
}  # fmt: skip


@pytest.mark.parametrize("steps", WAYS.values(), ids=WAYS)
def test_the_same_bits_however_it_is_fed(steps: Sequence[Fed]) -> None:
    wanted = torch.cat(fed(({1: LENGTH}, False, None)).out[1])
    assert torch.equal(torch.cat(fed(*steps).out[1]), wanted)


def test_equals_the_module_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    rig, hidden = Rig(), 32
    config = Qwen4ExpTextConfig(
        hidden_size=hidden, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS, linear_key_head_dim=KEY_WIDTH, linear_value_head_dim=VALUE_WIDTH,
        linear_conv_kernel_dim=TAPS, output_gate_type="sigmoid", rms_norm_eps=1e-6, ple_layer_ids=[],
    )  # fmt: skip
    module = modeling.Qwen4ExpTextGatedDeltaNet(config, 0).eval()
    x = torch.randn(LENGTH, hidden, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        module.conv1d.weight.copy_(rig.conv.unsqueeze(1))
        for name in ("A_log", "dt_bias"):
            getattr(module, name).copy_(rig.a_log if name == "A_log" else rig.dt_bias)
        module.norm.weight.copy_(rig.norm)
        wanted = module(x[None])[0]
        inner = rig.layer(
            rig.batch({0: LENGTH}, False), module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_a(x),
            module.in_proj_b(x), rig.ring, rig.states, torch.float32,
        )  # fmt: skip
        found = module.out_proj(inner)
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 1e-5


def test_a_decay_for_each_key_dimension() -> None:
    source = torch.Generator().manual_seed(6)
    state, q, k = (torch.randn(shape, generator=source) for shape in ((2, 3, 8, 5), (2, 3, 8), (2, 3, 8)))
    v, decay = torch.randn(2, 3, 5, generator=source), torch.rand(2, 3, 8, generator=source)
    rate = torch.rand(2, 3, 1, generator=source)
    new, out = delta_step(state, q, k, v, decay, rate)
    for b in range(2):
        for h in range(3):
            kept = torch.diag(decay[b, h]) @ state[b, h]
            wanted = kept + torch.outer(k[b, h], rate[b, h] * (v[b, h] - kept.T @ k[b, h]))
            assert torch.allclose(new[b, h], wanted, atol=1e-5)
            assert torch.allclose(out[b, h], wanted.T @ q[b, h], atol=1e-5)


@pytest.mark.parametrize("dilation", [1, 3])
def test_convolution_is_that_of_torch(dilation: int) -> None:
    source = torch.Generator().manual_seed(8)
    rows, weight = torch.randn(2, 30, 6, generator=source), torch.randn(6, 4, generator=source)
    wanted = torch.nn.functional.conv1d(rows.transpose(1, 2), weight.unsqueeze(1), groups=6, dilation=dilation)
    assert torch.allclose(causal_convolution(rows, weight, dilation), wanted.transpose(1, 2), atol=1e-6)


def test_history_is_rounded_to_the_ring_and_zero_before_the_text() -> None:
    rig = Rig()
    ring, rows = torch.ones(3, 1, 5, 2, dtype=torch.bfloat16), torch.rand(4, 1, 2)
    (run,) = with_history(rig.batch({2: 4}, False), rows, ring, 3)
    assert run.dtype == torch.bfloat16
    assert not run[:, :3].any()
    assert torch.equal(run[0, 3:], rows.bfloat16())
    assert torch.equal(ring[2, 0, :4], rows[:, 0].bfloat16())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 12, 128])
def test_fold_is_a_sum_whose_bits_do_not_depend_on_the_rest(size: int) -> None:
    x = torch.randn(9, size, 5, generator=torch.Generator().manual_seed(size))
    whole = fold(x, 1)
    assert torch.allclose(whole.double(), x.double().sum(1), atol=1e-5)
    assert all(torch.equal(fold(x[i : i + 1, :, j : j + 1], 1)[0, 0], whole[i, j]) for i in range(9) for j in range(5))


@pytest.mark.parametrize(
    ("made", "known"), [(softplus, torch.nn.functional.softplus), (silu, torch.nn.functional.silu)]
)
def test_activations(made: Callable[[Tensor], Tensor], known: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat((torch.linspace(-30, 30, 203), torch.tensor([-80.0, 90.0])))
    assert torch.allclose(made(x), known(x), rtol=1e-5, atol=1e-7)
    assert all(torch.equal(made(x[i : i + 1]), made(x)[i : i + 1]) for i in range(0, len(x), 3))
