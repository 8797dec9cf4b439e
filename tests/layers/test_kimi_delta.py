"""Kimi Delta Attention equals its equations and transformers' module, and has the same bits however it is fed."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.layers.kimi_delta import KimiDeltaAttention

HEADS, WIDTH, TAPS, LENGTH, STEP, LOWEST = 3, 16, 4, 60, 4, -5.0
INNER = HEADS * WIDTH


class Rig:
    """Two requests of one layer, fed by `step`; outputs are collected in order of position."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(3)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source)

        self.conv, self.a_log = noise(3 * INNER, TAPS) / 2, noise(HEADS) / 2
        self.dt_bias, self.norm = noise(INNER) - 1, 1 + 0.2 * noise(WIDTH)
        self.qkv, self.f, self.z = noise(2, LENGTH, 3 * INNER), noise(2, LENGTH, INNER), noise(2, LENGTH, INNER)
        self.b = noise(2, LENGTH, HEADS)
        self.layer = KimiDeltaAttention(
            HEADS, WIDTH, conv=self.conv, a_log=self.a_log, dt_bias=self.dt_bias, norm=self.norm, eps=1e-5,
            lowest=LOWEST,
        )  # fmt: skip
        # Dead rows of a ring hold what an earlier request left there.
        self.ring = torch.full((2, 1, TAPS - 1 + STEP, 3 * INNER), 7.0)
        self.states = torch.zeros(2, STEP, HEADS, WIDTH, WIDTH)
        self.lengths, self.candidates = [0, 0], [0, 0]
        self.out: list[list[Tensor]] = [[], []]

    def batch(self, rows: dict[int, int], keep: bool) -> StepBatch:
        starts = [self.lengths[s] for s in rows]
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, rows.values(), strict=True)])
        return StepBatch(
            tokens=positions, positions=positions, counts=tuple(rows.values()), slots=torch.tensor(list(rows)),
            lengths=torch.tensor(starts), block_tables=torch.zeros(len(rows), 1, dtype=torch.int64),
            candidates=torch.tensor([self.candidates[s] for s in rows]), keep_rows=keep, max_length=LENGTH,
        )  # fmt: skip

    def step(self, rows: dict[int, int], keep: bool, accept: int | None) -> None:
        """Run some rows of some requests; a verify step (``keep``) commits ``accept`` of them."""

        def taken(x: Tensor) -> Tensor:
            return torch.cat([x[s, self.lengths[s] : self.lengths[s] + n] for s, n in rows.items()])

        out = self.layer(
            self.batch(rows, keep), taken(self.qkv), taken(self.f), taken(self.b), taken(self.z), self.ring,
            self.states, torch.float32,
        )  # fmt: skip
        for s, part in zip(rows, torch.split(out, list(rows.values())), strict=True):
            done = rows[s] if accept is None else accept
            self.out[s].append(part[:done])
            self.lengths[s] += done
            self.candidates[s] = done - 1 if keep else 0


Fed = tuple[dict[int, int], bool, int | None]


def fed(*steps: Fed) -> Rig:
    rig = Rig()
    for rows, keep, accept in steps:
        rig.step(rows, keep, accept)
    return rig


def plain(rig: Rig, slot: int) -> Tensor:
    """The equations in float64 on a whole sequence, head by head."""
    u, w, rows = rig.qkv[slot].double(), rig.conv.double(), []
    memory = torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64)
    for t in range(LENGTH):
        taps = [w[:, j] * u[t - TAPS + 1 + j] for j in range(TAPS) if t - TAPS + 1 + j >= 0]
        c = torch.stack(taps).sum(0)
        q, k, v = (c / (1 + (-c).exp())).view(3, HEADS, WIDTH)
        f, dt = rig.f[slot, t].double().view(HEADS, WIDTH), rig.dt_bias.double().view(HEADS, WIDTH)
        out = []
        for h in range(HEADS):
            qh, kh = q[h] / (q[h] @ q[h] + 1e-6).sqrt() / math.sqrt(WIDTH), k[h] / (k[h] @ k[h] + 1e-6).sqrt()
            pace = LOWEST / (1 + (-math.exp(rig.a_log[h].item()) * (f[h] + dt[h])).exp())
            memory[h] = torch.diag(pace.exp()) @ memory[h]
            error = (v[h] - memory[h].T @ kh) / (1 + math.exp(-rig.b[slot, t, h].item()))
            memory[h] += torch.outer(kh, error)
            o = memory[h].T @ qh
            o = o / (o.square().mean() + 1e-5).sqrt() * rig.norm.double()
            out.append(o * torch.sigmoid(rig.z[slot, t].double().view(HEADS, WIDTH)[h]))
        rows.append(torch.cat(out))
    return torch.stack(rows)


def test_equals_its_equations() -> None:
    rig = fed(({0: LENGTH}, False, None), ({1: LENGTH}, False, None))
    for slot in (0, 1):
        wanted, found = plain(rig, slot), torch.cat(rig.out[slot]).double()
        assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 1e-5


WAYS: dict[str, tuple[Fed, ...]] = {
    "one by one": (({1: 1}, True, None),) * LENGTH,
    "first chunk shorter than the history": (({1: 2}, False, None), ({1: 1}, False, None), ({1: 57}, False, None)),
    "in company": (({0: 20, 1: 33}, False, None), *(({0: 3, 1: 3}, True, None),) * 9),
    "all drafts rejected": (({1: 30}, False, None), *(({1: 4}, True, 1),) * 27, ({1: 3}, True, None)),
    "some drafts rejected": (({1: 12}, False, None), *(({1: 4}, True, 3),) * 15, ({1: 3}, True, None)),
}  # fmt: skip


@pytest.mark.parametrize("steps", WAYS.values(), ids=WAYS)
def test_the_same_bits_however_it_is_fed(steps: Sequence[Fed]) -> None:
    wanted = torch.cat(fed(({1: LENGTH}, False, None)).out[1])
    assert torch.equal(torch.cat(fed(*steps).out[1]), wanted)


def test_equals_the_module_of_transformers() -> None:
    """Which runs the chunked form: equal in exact arithmetic."""
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    rig, hidden = Rig(), 32
    config = Glm5NextTextConfig(
        hidden_size=hidden, num_hidden_layers=1, layer_types=["linear_attention"], indexer_types=["full"],
        mlp_layer_types=["dense"], linear_num_heads=HEADS, linear_head_dim=WIDTH, linear_conv_kernel_dim=TAPS,
        linear_lower_bound=LOWEST, rms_norm_eps=1e-5,
    )  # fmt: skip
    module = modeling.Glm5NextTextLinearAttention(config, 0).eval()
    x, source = (
        torch.randn(LENGTH, hidden, generator=torch.Generator().manual_seed(4)),
        torch.Generator().manual_seed(5),
    )
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randn(value.shape, generator=source) * value.shape[-1] ** -0.5)
        module.conv1d.weight.copy_(rig.conv.unsqueeze(1))
        gate = module.forget_gate
        gate.A_log.copy_(rig.a_log)
        gate.dt_bias.copy_(rig.dt_bias)
        module.o_norm.weight.copy_(rig.norm)
        wanted = module(x[None])[0]
        qkv = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=1)
        inner = rig.layer(
            rig.batch({0: LENGTH}, False), qkv, gate.f_b_proj(gate.f_a_proj(x)), module.b_proj(x),
            module.g_b_proj(module.g_a_proj(x)), rig.ring, rig.states, torch.float32,
        )  # fmt: skip
        found = module.o_proj(inner)
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 1e-5
