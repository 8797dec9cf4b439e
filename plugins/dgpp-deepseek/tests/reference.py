"""DeepSeek-V4.1-Flash and its drafter from their equations, a sequence at a time, row by row where rows differ.

Nothing is shared with the package under test. ``kept``: rows as they are computed, or rounded to the forms that the
model was trained with.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below x."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


def nearest_of_grid(x: Tensor) -> Tensor:
    """Of `GRID`, with the sign of x; of two that are as near the one with the even number."""
    distance = (x.abs().clamp(max=6.0).unsqueeze(-1) - GRID).abs()
    odd = torch.arange(8) % 2
    order = torch.argsort(odd, stable=True)  # even numbers first, so that they are found first
    return torch.copysign(GRID[order][distance[..., order].argmin(-1)], x)


def in_groups(x: Tensor, size: int) -> Tensor:
    return x.float().reshape(*x.shape[:-1], -1, size)


def rounded_window(x: Tensor) -> Tensor:
    groups = in_groups(x, 32)
    scale = power_above(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448))
    return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def rounded_entry(x: Tensor) -> Tensor:
    groups = in_groups(x, 16)
    scale = (groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6).to(torch.float8_e4m3fn).float()
    return (nearest_of_grid(groups / scale) * scale).flatten(-2).to(x.dtype)


def rounded_key(x: Tensor) -> Tensor:
    groups = in_groups(x, 32)
    scale = power_above(groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) * (1 / 6))
    return (nearest_of_grid(groups / scale) * scale).flatten(-2).to(x.dtype)


def primes_from(start: int, count: int, taken: list[int]) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if start not in taken and all(start % d for d in range(2, int(start**0.5) + 1)):
            found.append(start)
            taken.append(start)
        start += 1
    return found


class Kept(NamedTuple):
    """What a text leaves: rows of each window, entries and keys of each source, what the drafter reads."""

    windows: dict[int, Tensor]
    entries: dict[int, Tensor]
    keys: dict[int, Tensor]
    chosen: dict[int, list[list[int]]]
    features: list[Tensor]
    streams: list[Tensor]


class Plain:
    """The model; ``weights`` by their names in a checkpoint, matrices dense."""

    def __init__(
        self, weights: Mapping[str, Tensor], config: Mapping[str, Any], *, kept: str = "plain",
        dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        self.w, self.c, self.dtype, self.native = weights, config["text_config"], dtype, kept == "native"
        taken: list[int] = []
        c = self.c
        sizes = range(c["engram_max_ngram_size"] - 1)
        self.primes = [
            [primes_from(c["engram_vocab_size"], c["engram_n_heads"], taken) for _ in sizes]
            for _ in c["engram_layer_ids"]
        ]

    def get(self, name: str) -> Tensor:
        return self.w[name].to(self.dtype)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.get(f"{name}.weight").T

    def norm(self, name: str, x: Tensor) -> Tensor:
        normed: Tensor = x / (x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()
        return normed * self.get(f"{name}.weight")

    def keep(self, how: Any, x: Tensor) -> Tensor:
        kept: Tensor = how(x) if self.native else x
        return kept

    def turn(self, x: Tensor, positions: Tensor, compressed: bool, sign: float = 1.0) -> Tensor:
        """The last dimensions of ``[T, ..., width]`` as complex numbers, times unit ones."""
        c, dims = self.c, self.c["qk_rope_head_dim"]
        theta, half = c["compress_rope_theta" if compressed else "rope_theta"], self.c["qk_rope_head_dim"] // 2
        each = theta ** -(torch.arange(half, dtype=torch.float64) * 2 / dims)
        if compressed:
            scaling = c["rope_scaling"]

            def edge(turns: float) -> Any:
                length = scaling["original_max_position_embeddings"]
                return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

            low, high = (
                max(math.floor(edge(scaling["beta_fast"])), 0),
                min(math.ceil(edge(scaling["beta_slow"])), dims - 1),
            )
            share = ((torch.arange(half).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
            each = each / scaling["factor"] * share + each * (1 - share)
        angle = (positions.double()[:, None] * each).view(len(x), *[1] * (x.dim() - 2), half)
        unit = torch.polar(torch.ones_like(angle), sign * angle)
        pairs = torch.view_as_complex(x[..., -dims:].double().reshape(*x.shape[:-1], half, 2))
        return torch.cat((x[..., :-dims], torch.view_as_real(pairs * unit).flatten(-2).to(x.dtype)), -1)

    def coefficients(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, count, eps = self.c, self.c["hc_mult"], self.c["hc_eps"]
        flat = streams.flatten(1)
        made = flat @ self.get(f"{name}_fn").T / (flat.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt()
        scale, base = self.get(f"{name}_scale"), self.get(f"{name}_base")
        pre = torch.sigmoid(made[:, :count] * scale[0] + base[:count]) + eps
        post = 2 * torch.sigmoid(made[:, count : 2 * count] * scale[1] + base[count : 2 * count])
        mix = torch.softmax((made[:, 2 * count :] * scale[2] + base[2 * count :]).view(-1, count, count), -1) + eps
        for turn in range(c["hc_sinkhorn_iters"]):
            if turn:
                mix = mix / (mix.sum(2, keepdim=True) + eps)
            mix = mix / (mix.sum(1, keepdim=True) + eps)
        return pre, post, mix

    def layer(self, name: str, streams: Tensor, pre: Tensor, attend: Any, experts: int) -> tuple[Tensor, Tensor]:
        """Both sublayers; the collapse before each takes what the site before it said."""
        for site, norm, sublayer in (
            ("attn", "attn_norm", attend), ("ffn", "ffn_norm", lambda u: self.mixture(f"{name}.ffn", u, experts)),
        ):  # fmt: skip
            following, post, mix = self.coefficients(f"{name}.hc_{site}", streams)
            given = sublayer(self.norm(f"{name}.{norm}", torch.einsum("ts,tsh->th", pre, streams)))
            streams = torch.einsum("tjs,tjh->tsh", mix, streams) + post[:, :, None] * given[:, None]
            pre = following
        return streams, pre

    def gated(self, name: str, u: Tensor) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate, up = self.linear(f"{name}.w1", u).clamp(max=limit), self.linear(f"{name}.w3", u).clamp(-limit, limit)
        return self.linear(f"{name}.w2", F.silu(gate) * up)

    def mixture(self, name: str, u: Tensor, met: int) -> Tensor:
        scores = F.softplus(self.linear(f"{name}.gate", u)).sqrt()
        chosen = (scores + self.get(f"{name}.gate.bias")).topk(met).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.c["routed_scaling_factor"]
        out = self.gated(f"{name}.shared_experts", u)
        for row in range(len(u)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                out[row] += weight * self.gated(f"{name}.experts.{expert}", u[row])
        return out

    def ngrams(self, layer: int, streams: Tensor, tokens: Sequence[int]) -> Tensor:
        c, name = self.c, f"layers.{layer}.engram"
        place, heads, size = c["engram_layer_ids"].index(layer), c["engram_n_heads"], c["engram_max_ngram_size"]
        bound = max(1, (2**63 - 1) // c["engram_compressed_vocab_size"] // 2)
        factors = np.random.default_rng(10007 * layer).integers(0, bound, size=size, dtype=np.int64).tolist()
        classes, table, rows = self.w["engram.token_classes"].long().tolist(), self.get(f"{name}.embed.weight"), []
        for at in range(len(tokens)):
            mixed, own = 0, []
            for back in range(size):
                token = tokens[at - back] if at >= back else c["engram_pad_token_id"]
                mixed ^= classes[token] * (2 * factors[back] + 1)
                if back:
                    before = sum(sum(run) for run in self.primes[place][: back - 1])
                    run = self.primes[place][back - 1]
                    own += [before + sum(run[:head]) + mixed % run[head] for head in range(heads)]
            rows.append(table[own].flatten())
        width, count = c["hidden_size"], c["hc_mult"]
        made = self.linear(f"{name}.wkv", torch.stack(rows))
        keys, value = made[:, : count * width].view(-1, count, width), made[:, count * width :]
        q, k = self.get(f"{name}.q_weight"), self.get(f"{name}.k_weight")

        def unit(x: Tensor) -> Tensor:
            length: Tensor = (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt()
            return x / length

        agreed = (unit(streams) * q * unit(keys) * k).sum(-1) / width**0.5
        gate = torch.sigmoid(agreed.sign() * agreed.abs().clamp(min=1e-6).sqrt())
        return streams + gate[:, :, None] * value[:, None]

    # attention

    def queries(self, name: str, u: Tensor, at: Tensor, compressed: bool) -> tuple[Tensor, Tensor]:
        latent = self.norm(f"{name}.q_norm", self.linear(f"{name}.wq_a", u))
        heads = self.linear(f"{name}.wq_b", latent).view(len(u), self.c["num_attention_heads"], -1)
        return latent, self.turn(heads, at, compressed)

    def rows(self, name: str, u: Tensor, at: Tensor, compressed: bool) -> Tensor:
        made = self.norm(f"{name}.kv_norm", self.linear(f"{name}.wkv", u))
        return self.keep(rounded_window, self.turn(made, at, compressed))

    def mixed(self, name: str, q: Tensor, rows: Tensor) -> Tensor:
        """One row's heads over rows that are keys and values; the sinks take their share and give nothing."""
        scores = q @ rows.T / self.c["head_dim"] ** 0.5
        weights = torch.softmax(torch.cat((scores, self.get(f"{name}.attn_sink")[:, None]), -1), -1)
        return weights[:, :-1] @ rows

    def written(self, name: str, mixed: Tensor, at: Tensor, compressed: bool) -> Tensor:
        back = self.turn(mixed, at, compressed, -1.0).view(len(mixed), self.c["o_groups"], -1)
        parts = self.get(f"{name}.wo_a.weight").chunk(self.c["o_groups"])
        return self.linear(f"{name}.wo_b", torch.cat([back[:, g] @ part.T for g, part in enumerate(parts)], -1))

    def publish(self, layer: int, u: Tensor, kept: Kept) -> None:
        name, ratio = f"layers.{layer}.attn", self.c["compress_ratios"][layer]
        pooled = self.linear(f"{name}.compressor.wkv", u)
        if ratio == 2:
            pairs = len(u) // 2
            gates = self.linear(f"{name}.compressor.wgate", u)[: 2 * pairs].view(pairs, 2, self.c["head_dim"])
            pooled = (torch.softmax(gates, 1) * pooled[: 2 * pairs].view(gates.shape)).sum(1)
        latent, at = self.norm(f"{name}.compressor.norm", pooled), ratio * torch.arange(len(pooled))
        keys = self.norm(f"{name}.indexer.k_norm", self.linear(f"{name}.indexer.wk", latent))
        kept.keys[layer] = self.keep(rounded_key, self.turn(keys, at, True))
        kept.entries[layer] = self.keep(rounded_entry, self.turn(latent, at, True))

    def choose(self, layer: int, u: Tensor, latent: Tensor, at: Tensor, kept: Kept, pools: list[list[int]]) -> None:
        """The entries of each row, ascending; ``pools``: the candidate source's, by row."""
        c, name = self.c, f"layers.{layer}.attn.indexer"
        source = max(s for s in c["kv_source_layer_ids"] if s <= layer)
        heads, width, size = c["index_n_heads"], c["index_head_dim"], c["candidate_block_size"]
        q = self.turn(self.linear(f"{name}.wq_b", latent).view(len(u), heads, width), at, True)
        q, weights = self.keep(rounded_key, q), self.linear(f"{name}.weights_proj", u) / (heads * width) ** 0.5
        kept.chosen[layer] = []
        for row, position in enumerate(at.tolist()):
            seen = (position + 1) // c["compress_ratios"][layer]
            scores = (weights[row][:, None] * torch.relu(q[row] @ kept.keys[source][:seen].T)).sum(0).tolist()
            allowed = list(range(seen))
            if layer == c["candidate_source_layer_id"]:
                blocks = {b: max(scores[b * size : (b + 1) * size]) for b in range(-(-seen // size))}
                blocks[(seen - 1) // size] = math.inf
                best = sorted(blocks, key=lambda b: (-blocks[b], b))[: c["candidate_topk_blocks"]]
                pools.append([e for e in allowed if e // size in best])
            elif layer > c["candidate_source_layer_id"]:
                allowed = pools[row]
            best = sorted(allowed, key=lambda e: (-scores[e], e))[: c["index_topk"]]
            kept.chosen[layer].append(sorted(best))

    def attention(self, layer: int, u: Tensor, at: Tensor, kept: Kept, pools: list[list[int]], floor: int) -> Tensor:
        c, name = self.c, f"layers.{layer}.attn"
        ratio = c["compress_ratios"][layer]
        latent, q = self.queries(name, u, at, ratio > 0)
        kept.windows[layer] = self.rows(name, u, at, ratio > 0)
        if layer in c["kv_source_layer_ids"] and layer not in kept.entries:
            self.publish(layer, u, kept)
        if layer in c["index_source_layer_ids"]:
            self.choose(layer, u, latent, at, kept, pools)
        outs, first = [], int(at[0])
        for row, position in enumerate(at.tolist()):
            low = max(floor, position - c["sliding_window"] + 1, first)
            seen = kept.windows[layer][low - first : position + 1 - first]
            if ratio:
                source = max(s for s in c["kv_source_layer_ids"] if s <= layer)
                chooser = max(s for s in c["index_source_layer_ids"] if s <= layer)
                seen = torch.cat((seen, kept.entries[source][kept.chosen[chooser][row]]))
            outs.append(self.mixed(name, q[row], seen))
        return self.written(name, torch.stack(outs), at, ratio > 0)

    # walks

    def begin(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        count = self.c["hc_mult"]
        pre = torch.zeros(len(tokens), count, dtype=self.dtype)
        pre[:, 0] = 1
        return self.get("embed.weight")[list(tokens)][:, None].repeat(1, count, 1), pre

    def hidden(self, tokens: Sequence[int], *, bounded: bool = False) -> tuple[Tensor, Kept]:
        """What the head reads, before its norm, and what is left; ``bounded``: of the last window's rows alone."""
        c, kept, pools = self.c, Kept({}, {}, {}, {}, [], []), list[list[int]]()
        streams, pre = self.begin(tokens)
        at, split, floor = torch.arange(len(tokens)), c["kv_source_layer_ids"][-1], 0
        for layer in range(c["num_hidden_layers"]):
            name = f"layers.{layer}"
            if bounded and layer == split:
                read = self.norm(f"{name}.attn_norm", torch.einsum("ts,tsh->th", pre, streams))
                self.publish(layer, read, kept)
                floor = max(0, len(tokens) - c["sliding_window"])
                streams, pre, at = streams[floor:], pre[floor:], at[floor:]
            if layer in c["dspark_target_layer_ids"]:
                kept.features.append(streams.mean(1))
            if layer in c["engram_layer_ids"]:
                streams = self.ngrams(layer, streams, tokens)

            def attend(u: Tensor, layer: int = layer, at: Tensor = at, floor: int = floor) -> Tensor:
                return self.attention(layer, u, at, kept, pools, floor)

            streams, pre = self.layer(name, streams, pre, attend, c["num_experts_per_tok"])
            kept.streams.append(streams)
        return torch.einsum("ts,tsh->th", pre, streams), kept

    def logits(self, hidden: Tensor, norm: str = "norm") -> Tensor:
        return self.linear("head", self.norm(norm, hidden))

    # the drafter

    def drafter_rows(self, kept: Kept, at: Tensor) -> list[Tensor]:
        """Rows of each stage's window at positions ``at``."""
        main = self.norm("mtp.0.main_norm", self.linear("mtp.0.main_proj", torch.cat(kept.features, -1)))
        stages = range(self.c["num_nextn_predict_layers"])
        return [self.rows(f"mtp.{stage}.attn", main, at, False) for stage in stages]

    def draft(self, following: int, rows: list[Tensor], count: int) -> tuple[list[int], Tensor, Tensor]:
        """Greedy drafts after ``count`` tokens and ``following``, their logits and their confidence.

        ``rows``: of each stage, the last ones before the block.
        """
        c, size = self.c, self.c["dspark_block_size"]
        at = torch.arange(count, count + size)
        streams, pre = self.begin([following, *[c["dspark_noise_token_id"]] * (size - 1)])
        for stage, held in enumerate(rows):
            name = f"mtp.{stage}.attn"

            def attend(u: Tensor, name: str = name, held: Tensor = held) -> Tensor:
                _, q = self.queries(name, u, at, False)
                seen = torch.cat((held[-c["sliding_window"] :], self.rows(name, u, at, False)))
                return self.written(name, torch.stack([self.mixed(name, one, seen) for one in q]), at, False)

            streams, pre = self.layer(f"mtp.{stage}", streams, pre, attend, c["dspark_num_experts_per_tok"])
        last = f"mtp.{c['num_nextn_predict_layers'] - 1}"
        hidden = torch.einsum("ts,tsh->th", pre, streams)
        base, drafts, logits, confidence = self.logits(hidden, f"{last}.norm"), [], [], []
        for place in range(size):
            known = self.get(f"{last}.markov_head.embed.weight")[following]
            logits.append(base[place] + self.linear(f"{last}.markov_head.head", known))
            confidence.append(self.linear(f"{last}.confidence_head.proj", torch.cat((hidden[place], known)))[0])
            following = int(logits[-1].argmax())
            drafts.append(following)
        return drafts, torch.stack(logits), torch.stack(confidence)
