"""Qwen3.8-Flash-Next on one whole text in float64, as plain equations: no state, no chunks, nothing from dgpp."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

TEXT = "model.language_model"


class Plain:
    """A forward.

    Args:
        weights: the checkpoint's tensors by name, as the values that they stand for.
        config: its config.json.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.weights, self.c = weights, config["text_config"]
        self.eps, self.branches, self.width = self.c["rms_norm_eps"], self.c["hc_count"], self.c["hidden_size"]

    def get(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"].double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.get(name).T

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Zero-centred; a weight of several branches norms each by itself."""
        weight = 1 + self.get(name)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight.view(-1, x.shape[-1]).squeeze(0)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[rows, ..., width]``, pairs half the turned width apart."""
        turned = int(self.c["head_dim"] * self.c["rope_parameters"]["partial_rotary_factor"])
        rates = self.c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, turned, 2).double() / turned)
        angles = (positions.double().unsqueeze(-1) * rates).view(len(x), *[1] * (x.dim() - 2), -1)
        a, b = x[..., : turned // 2], x[..., turned // 2 : turned]
        pair = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.cat((*pair, x[..., turned:]), -1)

    def mix(self, name: str, branches: Tensor) -> tuple[Tensor, Tensor]:
        """A sublayer's input, and the normed branches in one."""
        normed = self.norm(f"{name}.hc_norm", branches)
        low = F.silu(self.linear(f"{name}.input_mix_weight_down", normed.flatten(1)) / self.branches)
        gates = torch.sigmoid(self.linear(f"{name}.input_mix_weight_up", low)).view(normed.shape)
        return (gates * normed).mean(1), normed.flatten(1)

    def through(self, name: str, branches: Tensor, sublayer: Any) -> Tensor:
        x, normed = self.mix(name, branches)
        back = 2 * torch.sigmoid(self.linear(f"{name}.block_inject_weight", normed) / self.branches)
        return branches + back.unsqueeze(-1) * sublayer(x).unsqueeze(1)

    def delta(self, name: str, x: Tensor) -> Tensor:
        """A gated delta layer, token by token and head by head."""
        c, t = self.c, len(x)
        heads, keys, wide = c["linear_num_value_heads"], c["linear_num_key_heads"], c["linear_key_head_dim"]
        u, taps = self.linear(f"{name}.in_proj_qkv", x), self.get(f"{name}.conv1d").squeeze(1)
        padded = F.pad(u, (0, 0, taps.shape[1] - 1, 0))
        mixed = F.silu(sum(padded[j : j + t] * taps[:, j] for j in range(taps.shape[1])))
        q, k, v = mixed.split([keys * wide, keys * wide, heads * c["linear_value_head_dim"]], -1)
        q, k, v = q.view(t, keys, -1), k.view(t, keys, -1), v.view(t, heads, -1)
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        rate = torch.sigmoid(self.linear(f"{name}.in_proj_b", x))
        speed, bias = self.weights[f"{name}.A_log"].double().exp(), self.weights[f"{name}.dt_bias"].double()
        decay = torch.exp(-speed * F.softplus(self.linear(f"{name}.in_proj_a", x) + bias))
        out = torch.zeros_like(v)
        for h in range(heads):
            memory, at = torch.zeros(wide, v.shape[-1]).double(), h * keys // heads
            for row in range(t):
                memory = decay[row, h] * memory
                memory = memory + torch.outer(k[row, at], rate[row, h] * (v[row, h] - memory.T @ k[row, at]))
                out[row, h] = memory.T @ q[row, at] / math.sqrt(wide)
        out = out * (out.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.get(f"{name}.norm")
        return self.linear(f"{name}.out_proj", out.flatten(1) * torch.sigmoid(self.linear(f"{name}.in_proj_z", x)))

    def chosen(self, name: str, x: Tensor) -> Tensor:
        """bool ``[rows, keys]``: the best complete blocks, equal ones by number, and the open one."""
        c, t, ratio, wide = self.c, len(x), self.c["indexer_compress_ratio"], self.c["indexer_head_dim"]
        made, rows = self.linear(f"{name}.index_qk_proj", x), torch.arange(t)
        q = self.norm(f"{name}.q_layernorm", made[:, :-wide].view(t, -1, wide))
        q, blocks = self.rotated(q, rows), t // ratio
        pooled = made[: blocks * ratio, -wide:].view(blocks, ratio, wide).mean(1)
        pooled = self.rotated(self.norm(f"{name}.k_layernorm", pooled), ratio * torch.arange(blocks))
        scores = torch.einsum("thd,bd->thb", q, pooled).relu().sum(1)
        seen = torch.zeros(t, t, dtype=torch.bool)
        for row in range(t):
            complete = (row + 1) // ratio
            order = sorted(range(complete), key=lambda b: (-scores[row, b].item(), b))
            for block in order[: c["indexer_budget"] // ratio]:
                seen[row, ratio * block : ratio * (block + 1)] = True
            seen[row, ratio * complete : row + 1] = True
        return seen

    def sparse(self, name: str, x: Tensor) -> Tensor:
        """Attention over the chosen keys."""
        c, t, wide = self.c, len(x), self.c["head_dim"]
        q, gates = self.linear(f"{name}.q_proj", x).view(t, -1, 2, wide).unbind(2)
        k, v = (self.linear(f"{name}.{part}_proj", x).view(t, -1, wide) for part in "kv")
        q = self.rotated(self.norm(f"{name}.q_norm", q), torch.arange(t))
        k = self.rotated(self.norm(f"{name}.k_norm", k), torch.arange(t))
        share = c["num_attention_heads"] // c["num_key_value_heads"]
        scores = torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(share, 1)) / math.sqrt(wide)
        weights = scores.masked_fill(~self.chosen(f"{name}.indexer", x), -math.inf).softmax(-1)
        out = torch.einsum("hrk,khd->rhd", weights, v.repeat_interleave(share, 1)) * torch.sigmoid(gates)
        return self.linear(f"{name}.o_proj", out.flatten(1))

    def expert(self, name: str, x: Tensor) -> Tensor:
        inner = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", inner)

    def mixture(self, name: str, x: Tensor) -> Tensor:
        """Every row through its experts, one by one."""
        scores = self.linear(f"{name}.gate", x).softmax(-1)
        shared = torch.sigmoid(self.linear(f"{name}.shared_expert_gate", x)) * self.expert(f"{name}.shared_expert", x)
        rows = []
        for row, score in enumerate(scores):
            best = score.topk(self.c["num_experts_per_tok"])
            weights = best.values / best.values.sum()
            picked = zip(best.indices.tolist(), weights, strict=True)
            rows.append(sum(w * self.expert(f"{name}.experts.{e}", x[row]) for e, w in picked))
        return torch.stack(rows) + shared

    def layer(self, name: str, branches: Tensor) -> Tensor:
        mixer, part = (self.sparse, "self_attn")
        if f"{name}.linear_attn.A_log" in self.weights:
            mixer, part = self.delta, "linear_attn"
        branches = self.through(f"{name}.attn_hyper_connection", branches, lambda x: mixer(f"{name}.{part}", x))
        return self.through(f"{name}.mlp_hyper_connection", branches, lambda x: self.mixture(f"{name}.mlp", x))

    def ngram_rows(self, name: str, tokens: Sequence[int]) -> list[list[int]]:
        """Numbers of the table's rows, from the constants in the checkpoint."""
        a, sizes, offsets = (
            self.weights[f"{name}.{part}"].tolist()
            for part in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        )
        end, rows = self.c["eos_token_id"], []
        for t in range(len(tokens)):
            seen = [tokens[t]]
            for back in (1, 2):
                inside = t >= back and end not in tokens[t - back : t]
                seen.append(tokens[t - back] if inside else end)
            two = (seen[0] * a[0]) ^ (seen[1] * a[1])
            three = two ^ (seen[2] * a[2])
            half = len(sizes) // 2
            rows.append([(two if h < half else three) % sizes[h] + offsets[h] for h in range(len(sizes))])
        return rows

    def ngrams(self, name: str, branches: Tensor, tokens: Sequence[int]) -> Tensor:
        table = torch.cat([
            self.get(f"{name}.ple_embedding.ngram_embedding.shard_{s}") for s in range(self.c["split_ngram_parts"])
        ])  # fmt: skip
        rows = table[torch.tensor(self.ngram_rows(f"{name}.ple_embedding", tokens))].flatten(1)
        keys = self.norm(f"{name}.norm_key", self.linear(f"{name}.key_proj", rows).view(branches.shape))
        agreed = (keys * self.norm(f"{name}.norm_query", branches)).sum(-1) / math.sqrt(self.width)
        agreed = agreed.sign() * agreed.abs().clamp(min=1e-6).sqrt()
        given = torch.sigmoid(agreed).unsqueeze(-1) * self.linear(f"{name}.value_proj", rows).unsqueeze(1)
        taps, far = self.get(f"{name}.conv1d").squeeze(1), self.c["ngram_size"]
        normed = self.norm(f"{name}.norm_conv", given).flatten(1)
        padded = F.pad(normed, (0, 0, far * (taps.shape[1] - 1), 0))
        near = sum(padded[far * j : far * j + len(rows)] * taps[:, j] for j in range(taps.shape[1]))
        return branches + given + F.silu(near).view(branches.shape)

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """All branches after the last layer, ``[rows, branches, width]``."""
        branches = self.get(f"{TEXT}.embed_tokens")[list(tokens)].unsqueeze(1).repeat(1, self.branches, 1)
        for index in range(self.c["num_hidden_layers"]):
            if index + 1 in self.c["ple_layer_ids"]:
                branches = self.ngrams(f"{TEXT}.layers.{index}.ple", branches, tokens)
            branches = self.layer(f"{TEXT}.layers.{index}", branches)
        return branches

    def logits(self, branches: Tensor, mixer: str = TEXT) -> Tensor:
        return self.linear("lm_head", self.mix(f"{mixer}.hyper_connection_mixer", branches)[0])

    def drafted(self, branches: Tensor, following: Sequence[int]) -> Tensor:
        """The draft layer's branches for all rows; a row knows its own of the target and the next token."""
        embedded = self.norm("mtp.pre_fc_norm_embedding", self.get(f"{TEXT}.embed_tokens")[list(following)])
        normed = self.norm("mtp.pre_fc_norm_hidden", branches.flatten(1)).view(branches.shape)
        own = self.linear("mtp.fc_hidden", normed) + self.linear("mtp.fc_embedding", embedded).unsqueeze(1)
        return self.layer("mtp.layers.0", own)
