"""Rows of a hashed n-gram table, added to the branches before one layer.

A token and the one or two before it choose rows by a hash; what they say is gated by how it agrees with each branch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import CheckpointError, Shard
from dgpp_core.layers.block_index import unit_norm
from dgpp_core.layers.convolution import causal_convolution
from dgpp_core.layers.history import with_history
from dgpp_core.layers.rows import load_rows
from dgpp_core.ops.activation import sigmoid, silu
from dgpp_core.ops.fold import fold
from dgpp_core.ops.linear import Linear
from dgpp_qwen.flash_next.branches import centred
from dgpp_qwen.flash_next.config import FlashNextConfig
from dgpp_qwen.flash_next.hashing import constants
from dgpp_qwen.flash_next.step import Step

LEAST = 1e-6
"""Of the size of an agreement, before its root."""


class NgramTable:
    """The table, wherever it lies; in 8 bits its rows are widened as they are looked up.

    Ranks divide its pieces, each into equal runs of rows. A rank gives zeros for what it does not hold, and the ranks
    add up what they give: of a row one rank's part alone is not zero, so that nothing is rounded.
    """

    def __init__(self, config: FlashNextConfig, shard: Shard) -> None:
        self.boundary, self.share, self.dtype = config.boundary, config.heads_per_ngram, shard.dtype
        self.bus, known = shard.bus, constants(config)
        self.piece = -(-known.rows // config.ngram_parts)
        self.multipliers = _checked(shard, "layer_multipliers", known.multipliers)
        self.sizes = _checked(shard, "ngram_heads_vocab_sizes", known.sizes)
        self.offsets = _checked(shard, "ngram_heads_offsets", known.offsets)
        self.rows = load_rows(shard, "ple.table")
        self.scale = shard.weights.take("ple.scale").float() if config.storages.table else None

    def __call__(self, step: Step) -> Tensor:
        """``[R, ple_embed_dim]`` for the step's tokens; writes their ids."""
        return self.look_up(self.addresses(step))

    def look_up(self, rows: Tensor) -> Tensor:
        """Table rows by number, int64 ``[R, heads]``, beside each other; 8-bit ones rounded to bfloat16 once."""
        if self.bus.world == 1:
            return self._held(rows).flatten(1)
        run, within = self.piece // self.bus.world, rows % self.piece
        here = torch.div(within, run, rounding_mode="floor") == self.bus.rank
        # What is elsewhere costs no read of its own: where the table lies in files, a row is one.
        place = torch.div(rows, self.piece, rounding_mode="floor") * run + within % run
        found = self._held(torch.where(here, place, 0))
        return self.bus.all_reduce(torch.where(here.unsqueeze(-1), found, torch.zeros_like(found)).flatten(1))

    def _held(self, rows: Tensor) -> Tensor:
        """``[R, heads, width]`` of the rows that this rank holds."""
        if self.scale is None:
            return self.rows[rows].to(self.dtype)
        return (self.rows[rows].float() * self.scale).bfloat16().to(self.dtype)

    def addresses(self, step: Step) -> Tensor:
        """int64 ``[R, heads]``: the table's rows of each token. No n-gram reaches across the boundary token."""
        batch, before, parts = step.batch, 2, []
        for run in with_history(batch, batch.tokens.view(-1, 1, 1), step.state["ngram_ids"][0], before):
            ids, n = run.view(run.shape[:2]), run.shape[1] - before
            shifted = [ids[:, before - back : before - back + n] for back in range(before + 1)]
            parts.append(torch.stack(shifted, -1).flatten(0, 1))
        ids = torch.cat(parts)
        first = (ids[:, 1] != self.boundary) & (batch.positions >= 1)
        second = first & (ids[:, 2] != self.boundary) & (batch.positions >= 2)
        one, two = (torch.where(seen, ids[:, i], self.boundary) for i, seen in ((1, first), (2, second)))
        bigram = (ids[:, 0] * self.multipliers[0]) ^ (one * self.multipliers[1])
        trigram = bigram ^ (two * self.multipliers[2])
        mixed = torch.stack((bigram, trigram), -1).repeat_interleave(self.share, -1)
        return mixed % self.sizes + self.offsets


def _checked(shard: Shard, name: str, known: tuple[int, ...]) -> Tensor:
    """The checkpoint's constants, which must be those that follow from its config."""
    found = shard.weights.take(f"ple.{name}")
    if found.tolist() != list(known):
        raise CheckpointError(
            f"the checkpoint's n-gram table has other constants than its config.json: {name}",
            where=f"ple_embedding.{name}",
            found=str(found.tolist()),
            expected=str(list(known)),
            hint="config.json and the weights do not belong together",
        )
    return found


class Ngrams:
    """What is added to the branches.

    ``K_i, V = products of the rows e;  a = <norm K_i, norm R_i> / sqrt(width);  u_i = sigmoid(sign(a) sqrt|a|) V``, and
    to each ``u`` a dilated causal convolution of its norm.
    """

    def __init__(self, config: FlashNextConfig, shard: Shard) -> None:
        self.count, self.width, self.eps = config.hc_count, config.width, config.rms_norm_eps
        self.dilation, self.dtype = config.ngram_size, shard.dtype
        self.table, self.products = NgramTable(config, shard), Linear.load(shard, "ple.in")
        shape = (config.hc_count, config.width)
        self.key_norm, self.query_norm, self.conv_norm = (
            centred(shard, f"ple.{name}_norm").view(shape) for name in ("key", "query", "conv")
        )
        self.conv = shard.weights.take("ple.conv").float().squeeze(1)

    def __call__(self, branches: Tensor, step: Step) -> Tensor:
        """The branches ``[R, B, width]`` with the n-grams' rows in them."""
        made = self.products.wide(self.table(step), step.decode)
        split = self.count * self.width
        keys = unit_norm(made[:, :split].view(branches.shape), self.key_norm, self.eps)
        agreed = fold(keys * unit_norm(branches, self.query_norm, self.eps), -1) / self.width**0.5
        agreed = agreed.sign() * agreed.abs().clamp(min=LEAST).sqrt()
        given = sigmoid(agreed).unsqueeze(-1) * made[:, split:].unsqueeze(1)
        normed = unit_norm(given, self.conv_norm, self.eps).to(self.dtype).view(len(given), 1, split)
        ring, reach = step.state["ngram_rows"][0], (self.conv.shape[1] - 1) * self.dilation
        runs = with_history(step.batch, normed, ring, reach)
        near = torch.cat([
            causal_convolution(run.squeeze(2).float(), self.conv, self.dilation).flatten(0, 1) for run in runs
        ])  # fmt: skip
        return branches + given + silu(near).view(branches.shape)
