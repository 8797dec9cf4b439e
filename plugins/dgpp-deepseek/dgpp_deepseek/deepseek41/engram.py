"""Rows of a hashed n-gram table, added to the streams before a layer, gated by how they agree with each stream."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import CheckpointError, Shard
from dgpp_core.formats.scalars import decode_e4m3, decode_e8m0
from dgpp_core.layers.history import with_history
from dgpp_core.layers.rows import load_rows
from dgpp_core.ops.activation import sigmoid
from dgpp_core.ops.fold import fold
from dgpp_core.ops.linear import Linear
from dgpp_deepseek.deepseek41.config import Deepseek41Config
from dgpp_deepseek.deepseek41.hashing import HashConstants
from dgpp_deepseek.deepseek41.step import Step, summed
from dgpp_deepseek.deepseek41.tables import SIDECAR, constants_of

LEAST = 1e-6
"""Of the size of an agreement, before its root."""
SCALED = 32
"""Values of a table row that share a scale."""


class TokenClasses:
    """The class of each token, and of those before it in the text: what the hashes go by."""

    def __init__(self, config: Deepseek41Config, shard: Shard) -> None:
        self.reach, found = config.ngram_size - 1, shard.weights.take(SIDECAR)
        _check_classes(found.cpu(), config.token_classes)
        self.classes, self.pad = found, found[config.ngram_pad]

    def __call__(self, step: Step) -> Tensor:
        """int64 ``[R, ngram_size]``, the newest first; before the first token of a text lies padding."""
        batch, parts = step.batch, []
        for run in with_history(batch, batch.tokens.view(-1, 1, 1), step.state["ngram_tokens"][0], self.reach):
            ids, n = run.view(run.shape[:2]), run.shape[1] - self.reach
            back = [ids[:, self.reach - shift : self.reach - shift + n] for shift in range(self.reach + 1)]
            parts.append(torch.stack(back, -1).flatten(0, 1))
        there = batch.positions.unsqueeze(1) >= torch.arange(self.reach + 1, device=batch.positions.device)
        return torch.where(there, self.classes[torch.cat(parts)], self.pad)


def _check_classes(found: Tensor, count: int) -> None:
    """Refuse a map in which classes are not numbered in the order of their first token."""
    newest = torch.cummax(found, 0).values
    in_order = int(found[0]) == 0 and bool((newest.diff() <= 1).all()) and bool((found >= 0).all())
    if not in_order or int(newest[-1]) != count - 1:
        raise CheckpointError(
            "the classes of tokens do not belong to this config.json",
            where=SIDECAR,
            found=f"{int(newest[-1]) + 1} classes" if in_order else "classes that are not numbered in order",
            expected=f"{count}, as engram_compressed_vocab_size says, in the order of their first token",
            hint="make them anew from the checkpoint's tokenizer: dgpp engram-classes",
        )


class Table:
    """This rank's slots of one layer's table, wherever it lies; rows in 8 bits are widened as they are looked up."""

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str, constants: HashConstants) -> None:
        each, self.dtype = config.ngram_slots // shard.bus.world, shard.dtype
        self.heads, self.first, self.own = config.ngram_heads, each * shard.bus.rank, each
        self.multipliers = constants.multipliers
        mine = slice(self.first, self.first + each)
        self.sizes, self.offsets = (
            torch.tensor(values[mine], device=shard.device) for values in (constants.sizes, constants.offsets)
        )
        self.rows = load_rows(shard, f"{part}.table")
        self.scales = load_rows(shard, f"{part}.scales") if config.quantised else None

    def __call__(self, classes: Tensor) -> Tensor:
        """``[R, slots * width]`` for tokens' classes ``[R, ngram_size]``."""
        rows = self.addresses(classes)
        if self.scales is None:
            return self.rows[rows].flatten(1).to(self.dtype)
        scales = decode_e8m0(self.scales[rows].view(torch.uint8))
        return (decode_e4m3(self.rows[rows]) * scales.repeat_interleave(SCALED, -1)).flatten(1).to(self.dtype)

    def addresses(self, classes: Tensor) -> Tensor:
        """int64 ``[R, slots]``: table rows, by size of n-gram and, within each, by head."""
        mixed, hashes = classes[:, 0] * self.multipliers[0], []
        for shift in range(1, len(self.multipliers)):
            mixed = mixed ^ (classes[:, shift] * self.multipliers[shift])
            hashes.append(mixed)
        whole = torch.stack(hashes, -1).repeat_interleave(self.heads, -1)
        return whole[:, self.first : self.first + self.own] % self.sizes + self.offsets


class Engram:
    """What the rows give to each stream: ``x_i + sigmoid(sign(d_i) sqrt|d_i|) value``.

    ``d_i = <q_i x_i / rms(x_i), k_i key_i / rms(key_i)> / sqrt(width)``; keys and value are products of the rows.
    """

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str, layer: int) -> None:
        self.bus, self.eps, self.dtype = shard.bus, config.rms_norm_eps, shard.dtype
        self.streams, self.width = config.hc_mult, config.width
        self.table = Table(config, shard, part, constants_of(config)[config.engram_layers.index(layer)])
        self.products = Linear.load(shard, f"{part}.products")
        q, k = (shard.weights.take(f"{part}.{name}_weight").float() for name in ("q", "k"))
        self.weight = q * k

    def __call__(self, streams: Tensor, classes: Tensor, step: Step) -> Tensor:
        """The streams, float32 ``[R, S, width]``, with the n-grams' rows in them."""
        made = summed(self.products, self.bus, self.table(classes), step.decode)
        key, value = made[:, : -self.width].view(streams.shape), made[:, -self.width :]
        agreed = fold(streams * self.weight * key, -1) * self._length(streams) * self._length(key) * self.width**-0.5
        gate = sigmoid(agreed.sign() * agreed.abs().clamp(min=LEAST).sqrt())
        return (streams + gate.unsqueeze(-1) * value.unsqueeze(1)).to(self.dtype).float()

    def _length(self, x: Tensor) -> Tensor:
        """The reciprocal of the root mean square of the last axis."""
        return torch.rsqrt(fold(x.square(), -1) / self.width + self.eps)
