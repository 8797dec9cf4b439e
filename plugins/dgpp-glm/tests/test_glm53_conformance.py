"""GLM-5.3 keeps the contract: every check of the kit against its equations written out in plain torch."""

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
    """The model over one whole text, no cache, keys and values of every head written out, float64.

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
        return F.linear(x, self.get(f"{name}.weight"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.get(f"{name}.weight"), self.eps)

    def turn(self, x: Tensor) -> Tensor:
        """Dimensions (2i, 2i + 1) of ``[T, heads, D]`` as a complex number, turned by its position."""
        speeds = self.c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
        spin = torch.polar(torch.ones(1).double(), torch.arange(len(x)).double()[:, None] * speeds)[:, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * spin
        return torch.view_as_real(pairs).flatten(-2)

    def chosen(self, name: str, x: Tensor, q_latent: Tensor) -> Tensor:
        """bool ``[T, T]``: each row's keys, by sorting them in Python."""
        heads, width, turned = self.c["index_n_heads"], self.c["index_head_dim"], self.c["qk_rope_head_dim"]
        q = self.linear(f"{name}.wq_b", q_latent).view(len(x), heads, width)
        norm, bias = self.get(f"{name}.k_norm.weight"), self.get(f"{name}.k_norm.bias")
        k = F.layer_norm(self.linear(f"{name}.wk", x), (width,), norm, bias, 1e-6)[:, None]
        q, k = (torch.cat((self.turn(rows[..., :turned]), rows[..., turned:]), -1) for rows in (q, k))
        gates = self.linear(f"{name}.weights_proj", x) * heads**-0.5
        dots = torch.relu(torch.einsum("thd,sd->ths", q, k[:, 0]) * width**-0.5)
        scores, found = torch.einsum("th,ths->ts", gates, dots), torch.zeros(len(x), len(x), dtype=torch.bool)
        for row, mine in enumerate(scores.tolist()):
            order = sorted((-score, at) for at, score in enumerate(mine[: row + 1]))
            found[row, [at for _, at in order[: self.c["index_topk"]]]] = True
        return found

    def attention(self, name: str, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """What it adds, and the keys that it attended to: ``seen`` where the layer has no indexer."""
        c, rank, keys = self.c, self.c["kv_lora_rank"], self.c["qk_nope_head_dim"]
        q_latent = self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x))
        if f"{name}.indexer.wk.weight" in self.weights:
            seen = self.chosen(f"{name}.indexer", x, q_latent)
        q = self.linear(f"{name}.q_b_proj", q_latent).view(len(x), c["num_attention_heads"], -1)
        both = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        latent = self.norm(f"{name}.kv_a_layernorm", both[:, :rank])
        parts = self.linear(f"{name}.kv_b_proj", latent).view(len(x), c["num_attention_heads"], -1)
        shared = self.turn(both[:, None, rank:]).expand(-1, q.shape[1], -1)
        q = torch.cat((q[..., :keys], self.turn(q[..., keys:])), -1)
        k, v = torch.cat((parts[..., :keys], shared), -1), parts[..., keys:]
        q, k, v = (rows.transpose(0, 1) for rows in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.linear(f"{name}.o_proj", out.transpose(0, 1).flatten(1)), seen

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

    def layer(self, index: int, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        name = f"model.layers.{index}"
        added, seen = self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x), seen)
        x = x + added
        mlp = self.feed_forward if index < self.c["first_k_dense_replace"] else self.mixture
        return x + mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x)), seen

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        x, seen = self.get("model.embed_tokens.weight")[list(tokens)], torch.empty(0)
        for index in range(self.layers):
            x, seen = self.layer(index, x, seen)
        return self.norm("model.norm", x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear("lm_head", hidden)

    def drafted(self, hidden: Tensor, following: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The draft layer's residual and its norm, for all rows: a row knows its hidden state and the next token."""
        name = f"model.layers.{self.layers}"
        embedded = self.norm(f"{name}.enorm", self.get("model.embed_tokens.weight")[list(following)])
        mixed = self.linear(f"{name}.eh_proj", torch.cat((embedded, self.norm(f"{name}.hnorm", hidden)), -1))
        residual, _ = self.layer(self.layers, mixed, torch.empty(0))
        return residual, self.norm(f"{name}.shared_head.norm", residual)


class TestGlm53(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "glm53"
    template = TEMPLATES / "GLM-5.2.jinja"
    reply_tokens = 4
    worlds = (1, 2, 4)

    @classmethod
    def golden_cases(cls) -> Mapping[str, Mapping[str, Any]]:
        """Prompts of GLM-5.2, the same architecture, beside the checkout where they are there at all."""
        return recorded_cases(TEMPLATES / "golden", "GLM-5.2", ABSENT)

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The equations."""
        plain = Plain(weights, config)
        return plain.logits(plain.hidden(tokens)).float()


class TestDraftLayer(DraftLayerConformance):
    """The draft layer against its equations, and what its drafts come to."""

    model = "glm53"

    def equations(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Plain:
        """The equations."""
        return Plain(weights, config)

    def test_its_output_before_the_last_norm(self, world: World, plain: Plain) -> None:
        """As the model's first engine hands it on."""
        world.engine.drafter.recycle_normed = False  # type: ignore[union-attr]
        residual, _ = plain.drafted(plain.hidden(self.tokens[:-1]), self.tokens[1:])
        assert self.relative(self.observed(world, [39], decode=False), residual) < 1e-5
