"""GLM-4.7 keeps the contract: every check of the kit against its equations written out in plain torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.testing import ModelConformance
from dgpp_core.testing.world import World

TEMPLATES = Path(__file__).parents[4] / "shared" / "data" / "chat_templates"


class Plain:
    """The model over one whole text, no cache, one expert after the other, float64.

    Args:
        weights: the checkpoint's tensors, float32.
        config: its config.json.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.weights, self.c = weights, config
        self.eps, self.layers = config["rms_norm_eps"], config["num_hidden_layers"]

    def get(self, name: str) -> Tensor:
        return self.weights[name].double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.get(f"{name}.bias") if f"{name}.bias" in self.weights else None
        return F.linear(x, self.get(f"{name}.weight"), bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.get(f"{name}.weight"), self.eps)

    def turn(self, x: Tensor) -> Tensor:
        """Dimensions (i, i + half) of the first ones of each head as a complex number, turned by its position."""
        width = int(self.c["head_dim"] * self.c["partial_rotary_factor"])
        half = width // 2
        speeds = self.c["rope_theta"] ** (-torch.arange(half).double() / half)
        spin = torch.polar(torch.ones(1).double(), torch.arange(len(x)).double()[:, None] * speeds)[:, None]
        pairs = torch.complex(x[..., :half], x[..., half:width]) * spin
        return torch.cat((pairs.real, pairs.imag, x[..., width:]), -1)

    def attention(self, name: str, x: Tensor) -> Tensor:
        q, k, v = (self.linear(f"{name}.{part}_proj", x).view(len(x), -1, self.c["head_dim"]) for part in "qkv")
        q, k = self.turn(self.norm(f"{name}.q_norm", q)), self.turn(self.norm(f"{name}.k_norm", k))
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], 1) for rows in (k, v))
        out = F.scaled_dot_product_attention(*(rows.transpose(0, 1) for rows in (q, k, v)), is_causal=True)
        return self.linear(f"{name}.o_proj", out.transpose(0, 1).flatten(1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def mixture(self, name: str, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.linear(f"{name}.gate", x))
        biased, out = scores + self.get(f"{name}.gate.e_score_correction_bias"), []
        for row, score, wanted in zip(x, scores, biased, strict=True):
            chosen = wanted.topk(self.c["num_experts_per_tok"]).indices.sort().values
            weights = score[chosen] / score[chosen].sum() * self.c["routed_scaling_factor"]
            each = [self.feed_forward(f"{name}.experts.{e}", row[None])[0] for e in chosen.tolist()]
            out.append(torch.einsum("e,eh->h", weights, torch.stack(each)))
        return torch.stack(out) + self.feed_forward(f"{name}.shared_experts", x)

    def layer(self, index: int, x: Tensor) -> Tensor:
        name = f"model.layers.{index}"
        x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        mlp = self.feed_forward if index < self.c["first_k_dense_replace"] else self.mixture
        return x + mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        x = self.get("model.embed_tokens.weight")[list(tokens)]
        for index in range(self.layers):
            x = self.layer(index, x)
        return self.norm("model.norm", x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear("lm_head", hidden)

    def drafted(self, hidden: Tensor, following: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The draft layer's residual and its norm, for all rows: a row knows its hidden state and the next token."""
        name = f"model.layers.{self.layers}"
        embedded = self.norm(f"{name}.enorm", self.get("model.embed_tokens.weight")[list(following)])
        mixed = self.linear(f"{name}.eh_proj", torch.cat((embedded, self.norm(f"{name}.hnorm", hidden)), -1))
        residual = self.layer(self.layers, mixed)
        return residual, self.norm(f"{name}.shared_head.norm", residual)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


class TestGlm47(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "glm47"
    template = TEMPLATES / "GLM-4.7.jinja"
    reply_tokens = 8
    worlds = (1, 2, 4)

    @classmethod
    def golden_cases(cls) -> Mapping[str, Mapping[str, Any]]:
        """Prompts recorded from transformers, beside the checkout where they are there at all."""
        rendered = json.loads((TEMPLATES / "golden" / "GLM-4.7.json").read_text(encoding="utf-8"))
        cases = json.loads((TEMPLATES / "golden" / "conversations.json").read_text(encoding="utf-8"))
        # Absent content is empty text here; the recorder handed the template a None, which it wrote out.
        absent = rendered["null_content"]
        absent["prompt"] = absent["prompt"].replace("</think>None<tool_call>", "</think><tool_call>")
        return {name: case | rendered[name] for name, case in cases.items() if "prompt" in rendered[name]}

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The equations."""
        plain = Plain(weights, config)
        return plain.logits(plain.hidden(tokens)).float()


class TestDraftLayer:
    """The draft layer against its equations, and what its drafts come to."""

    model = "glm47"

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> LoadedModel:
        return TestGlm47.host().model("glm47")

    folder = TestGlm47.folder

    @pytest.fixture
    def world(self, loaded: LoadedModel, folder: Path) -> World:
        settings = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=True, mtp_depth=5)
        return World.from_checkpoint(loaded, folder, settings)

    @pytest.fixture
    def plain(self, folder: Path) -> Plain:
        return Plain(load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()))

    tokens = torch.randint(512, (40,), generator=torch.Generator().manual_seed(9)).tolist()

    def batch(self, start: int, count: int, *, decode: bool) -> StepBatch:
        """Rows of a text whose blocks are 1, 2, 3, ..."""
        at = torch.arange(start, start + count)
        return StepBatch(
            tokens=torch.tensor(self.tokens)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
            lengths=torch.tensor([start]), block_tables=torch.arange(1, 5)[None], candidates=torch.tensor([0]),
            keep_rows=decode, max_length=start + count,
        )  # fmt: skip

    @torch.inference_mode()
    def observed(self, world: World, counts: list[int], *, decode: bool) -> Tensor:
        """The drafter's hidden states of all rows but the last, run so many a step."""
        drafter, pools, rows, start = world.engine.drafter, world.engine.state.pools, [], 0
        assert drafter is not None
        for count in counts:
            batch = self.batch(start, count, decode=decode)
            hidden = world.engine.model.forward(batch, pools)
            following = torch.tensor(self.tokens[start + 1 : start + count + 1])
            rows.append(drafter.observe(batch, hidden, following, pools))
            start += count
        return torch.cat(rows)

    def test_equals_its_equations_in_prefill_and_step_by_step(self, world: World, plain: Plain) -> None:
        residual, normed = plain.drafted(plain.hidden(self.tokens[:-1]), self.tokens[1:])
        whole = self.observed(world, [39], decode=False)
        assert relative(whole, normed) < 1e-5
        assert relative(world.engine.model.logits(whole), plain.logits(normed)) < 1e-5
        assert torch.equal(self.observed(world, [1] * 39, decode=True), whole)
        assert torch.equal(self.observed(world, [7, 16, 16], decode=False), whole)
        world.engine.drafter.recycle_normed = False  # type: ignore[union-attr]
        assert relative(self.observed(world, [39], decode=False), residual) < 1e-5

    @pytest.mark.parametrize("recycle_normed", [True, False])
    def test_deeper_drafts_run_over_the_layers_own_output(
        self, world: World, plain: Plain, recycle_normed: bool
    ) -> None:
        drafter, depth, taken = world.engine.drafter, 5, 0 if not recycle_normed else 1
        assert drafter is not None
        drafter.recycle_normed = recycle_normed  # type: ignore[attr-defined]
        own = self.observed(world, [39], decode=False)[-1:]
        tail, committed = self.batch(38, 1, decode=True), torch.tensor(self.tokens[39:])
        with torch.inference_mode():
            drafts = drafter.propose(tail, own, committed, depth, world.engine.state.pools)
        hidden, following, wanted = plain.hidden(self.tokens[:-1]), self.tokens[1:], []
        for _ in range(depth):
            both = plain.drafted(hidden, following)
            wanted.append(int(plain.logits(both[1])[-1].argmax()))
            hidden, following = torch.cat((hidden, both[taken][-1:])), [*following, wanted[-1]]
        assert drafts.tolist() == [wanted]

    def test_the_hidden_state_before_the_last_norm_gives_other_drafts(self, world: World, plain: Plain) -> None:
        """The draft layer reads the target's state after its last norm: the other one must be told apart."""
        x = plain.get("model.embed_tokens.weight")[self.tokens[:-1]]
        for index in range(plain.layers):
            x = plain.layer(index, x)
        wrong = plain.drafted(x, self.tokens[1:])[1]
        assert relative(self.observed(world, [39], decode=False), wrong) > 1e-2
