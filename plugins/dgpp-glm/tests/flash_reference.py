"""GLM-5.3-Flash's equations in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Plain:
    """The text model over one whole text, no cache, keys and values of every head written out, float64.

    Args:
        weights: the checkpoint's tensors, float32.
        config: its config.json.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.weights, self.c = weights, config["text_config"]
        self.eps, self.layers = self.c["rms_norm_eps"], self.c["num_hidden_layers"]

    def get(self, name: str) -> Tensor:
        return self.weights[name if name.startswith("lm_head") else f"model.language_model.{name}"].double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.get(f"{name}.weight"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.get(f"{name}.weight"), self.eps)

    def delta(self, name: str, x: Tensor) -> Tensor:
        """Kimi Delta Attention, head by head and token by token."""
        c = self.c["linear_attn_config"]
        heads, width, taps, out = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"], []

        def convolved(part: str) -> Tensor:
            rows = F.pad(self.linear(f"{name}.{part}_proj", x), (0, 0, taps - 1, 0)).T[None]
            return F.silu(F.conv1d(rows, self.get(f"{name}.{part}_conv1d.weight"), groups=rows.shape[1]))[0].T

        q, k, v = (convolved(part).view(len(x), heads, width) for part in "qkv")
        q, k = (rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (q, k))
        f = (self.linear(f"{name}.f_b_proj", self.linear(f"{name}.f_a_proj", x)) + self.get(f"{name}.dt_bias")).view_as(
            q
        )
        decay = (c["gate_lower_bound"] * torch.sigmoid(self.get(f"{name}.A_log").exp()[:, None] * f)).exp()
        rate, memory = torch.sigmoid(self.linear(f"{name}.b_proj", x)), torch.zeros(heads, width, width).double()
        for t in range(len(x)):
            memory = memory * decay[t, :, :, None]
            error = rate[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
            memory = memory + torch.einsum("hk,hv->hkv", k[t], error)
            out.append(torch.einsum("hkv,hk->hv", memory, q[t]) * width**-0.5)
        gate = torch.sigmoid(self.linear(f"{name}.g_b_proj", self.linear(f"{name}.g_a_proj", x)))
        return self.linear(f"{name}.o_proj", self.norm(f"{name}.o_norm", torch.stack(out)).flatten(1) * gate)

    def chosen(self, name: str, x: Tensor, q_latent: Tensor) -> Tensor:
        """bool ``[T, T]``: each row's keys, by sorting its blocks in Python."""
        heads, width, size = self.c["index_n_heads"], self.c["index_head_dim"], self.c["index_kpool"]
        blocks, found = len(x) // size, torch.zeros(len(x), len(x), dtype=torch.bool)
        norm, bias = self.get(f"{name}.k_norm.weight"), self.get(f"{name}.k_norm.bias")
        k = F.layer_norm(self.linear(f"{name}.wk", x), (width,), norm, bias, 1e-6)
        weights = F.linear(x, self.get(f"{name}.index_kpool_compress_gate"))
        k, weights = (rows[: blocks * size].view(blocks, size, width) for rows in (k, weights))
        pooled = (torch.softmax(weights + self.get(f"{name}.index_kpool_compress_ape"), 1) * k).sum(1)
        q = self.linear(f"{name}.wq_b", q_latent).view(len(x), heads, width)
        gates = self.linear(f"{name}.weights_proj", x) * heads**-0.5
        scores = torch.einsum("th,thb->tb", gates, torch.relu(torch.einsum("thd,bd->thb", q, pooled) * width**-0.5))
        for row, mine in enumerate(scores.tolist()):
            done = (row + 1) // size
            order = sorted((-score, block) for block, score in enumerate(mine[:done]))
            for _, block in order[: self.c["index_topk"] // size]:
                found[row, size * block : size * (block + 1)] = True
            found[row, size * done : row + 1] = True
        return found

    def latent(self, name: str, x: Tensor) -> Tensor:
        """Latent attention to the chosen keys."""
        c, keys = self.c, self.c["qk_nope_head_dim"]
        q_latent = self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x))
        seen = self.chosen(f"{name}.indexer", x, q_latent)
        q = self.linear(f"{name}.q_b_proj", q_latent).view(len(x), c["num_attention_heads"], -1)
        latent = self.norm(f"{name}.kv_a_layernorm", self.linear(f"{name}.kv_a_proj_with_mqa", x))
        parts = self.linear(f"{name}.kv_b_proj", latent).view(len(x), c["num_attention_heads"], -1)
        q, k, v = (rows.transpose(0, 1) for rows in (q, parts[..., :keys], parts[..., keys:]))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.linear(f"{name}.o_proj", out.transpose(0, 1).flatten(1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate, up = self.linear(f"{name}.gate_proj", x).clamp(max=limit), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", F.silu(gate) * up.clamp(-limit, limit))

    def mixture(self, name: str, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.linear(f"{name}.gate", x))
        biased, out = scores + self.get(f"{name}.gate.e_score_correction_bias"), []
        for row, score, wanted in zip(x, scores, biased, strict=True):
            chosen = wanted.topk(self.c["num_experts_per_tok"]).indices.sort().values
            weights = score[chosen] / score[chosen].sum() * self.c["routed_scaling_factor"]
            each = [self.feed_forward(f"{name}.experts.{e}", row[None])[0] for e in chosen.tolist()]
            out.append(torch.einsum("e,eh->h", weights, torch.stack(each)))
        return torch.stack(out) + self.feed_forward(f"{name}.shared_experts", x)

    def site(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a sublayer reads ``[T, H]``, its share in each stream ``[T, S]``, and the mix ``[T, from, to]``."""
        count, eps, flat = self.c["hc_mult"], self.c["hc_eps"], streams.flatten(1)
        made = F.linear(F.rms_norm(flat, (flat.shape[1],), eps=self.eps), self.get(f"{name}_fn"))
        base, scale = self.get(f"{name}_base"), self.get(f"{name}_scale")
        pre, post, mix = torch.split(made, [count, count, count**2], 1)
        pre = torch.sigmoid(pre * scale[0] + base[:count]) + eps
        post = 2 * torch.sigmoid(post * scale[1] + base[count : 2 * count])
        mix = torch.softmax((mix * scale[2] + base[2 * count :]).view(-1, count, count), 2) + eps
        for turn in range(2 * self.c["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(1 + turn % 2, keepdim=True) + eps)
        return torch.einsum("ts,tsh->th", pre, streams), post, mix

    def through(self, name: str, streams: Tensor, sublayer: Callable[[Tensor], Tensor], norm: str) -> Tensor:
        x, post, mix = self.site(name, streams)
        return torch.einsum("tji,tjh->tih", mix, streams) + post[..., None] * sublayer(self.norm(norm, x))[:, None]

    def layer(self, index: int, streams: Tensor) -> Tensor:
        name = f"layers.{index}"
        attend = self.delta if self.c["layer_types"][index] == "linear_attention" else self.latent
        streams = self.through(
            f"{name}.hc_attn", streams, lambda x: attend(f"{name}.self_attn", x), f"{name}.input_layernorm"
        )
        mlp = self.feed_forward if index < self.c["first_k_dense_replace"] else self.mixture
        return self.through(
            f"{name}.hc_ffn", streams, lambda x: mlp(f"{name}.mlp", x), f"{name}.post_attention_layernorm"
        )

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        streams = self.get("embed_tokens.weight")[list(tokens)][:, None].repeat(1, self.c["hc_mult"], 1)
        for index in range(self.layers):
            streams = self.layer(index, streams)
        return self.norm("norm", streams.mean(1))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear("lm_head", hidden)

    def drafted(self, hidden: Tensor, following: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The draft layer's rows before and after its last norm, from the target's, each with the token after it."""
        name = f"layers.{self.layers}"
        embedded = self.norm(f"{name}.enorm", self.get("embed_tokens.weight")[list(following)])
        x = self.linear(f"{name}.eh_proj", torch.cat((embedded, self.norm(f"{name}.hnorm", hidden)), 1))
        x = x + self.latent(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        x = x + self.mixture(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        return x, self.norm(f"{name}.shared_head.norm", x)
