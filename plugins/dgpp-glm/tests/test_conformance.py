"""GLM-4.7 keeps the contract: every check of the kit against its equations written out in plain torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.testing import ModelConformance
from dgpp_core.testing.draft_layer import DraftLayerConformance
from dgpp_core.testing.recorded import ABSENT, recorded_cases
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


class TestGlm47(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "glm47"
    template = TEMPLATES / "GLM-4.7.jinja"
    reply_tokens = 8
    worlds = (1, 2, 4)

    @classmethod
    def golden_cases(cls) -> Mapping[str, Mapping[str, Any]]:
        """Prompts recorded from transformers, beside the checkout where they are there at all."""
        return recorded_cases(TEMPLATES / "golden", "GLM-4.7", ABSENT)

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The equations."""
        plain = Plain(weights, config)
        return plain.logits(plain.hidden(tokens)).float()


class TestDraftLayer(DraftLayerConformance):
    """The draft layer against its equations, and what its drafts come to."""

    model = "glm47"

    def equations(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Plain:
        """The equations."""
        return Plain(weights, config)

    def test_over_its_output_before_the_last_norm(self, world: World, plain: Plain) -> None:
        """As the model's first engine did it."""
        world.engine.drafter.recycle_normed = False  # type: ignore[union-attr]
        residual, _ = plain.drafted(plain.hidden(self.tokens[:-1]), self.tokens[1:])
        assert self.relative(self.observed(world, [39], decode=False), residual) < 1e-5
        assert self.proposed(world) == self.chain(plain, normed=False)

    def test_the_hidden_state_before_the_last_norm_gives_other_drafts(self, world: World, plain: Plain) -> None:
        """The draft layer reads the target's state after its last norm: the other one must be told apart."""
        x = plain.get("model.embed_tokens.weight")[self.tokens[:-1]]
        for index in range(plain.layers):
            x = plain.layer(index, x)
        wrong = plain.drafted(x, self.tokens[1:])[1]
        assert self.relative(self.observed(world, [39], decode=False), wrong) > 1e-2
