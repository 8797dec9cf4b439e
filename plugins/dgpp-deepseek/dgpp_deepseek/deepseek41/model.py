"""The arithmetic of DeepSeek-V4.1-Flash, text, on one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.embedding import Embedding
from dgpp_core.layers.feed_forward import FeedForward, Mixture
from dgpp_core.layers.hyper_connections import Coefficients, HyperConnection, collapse, expand
from dgpp_core.ops.experts import Experts
from dgpp_core.ops.fold import fold
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.router import Router
from dgpp_deepseek.deepseek41.attention import Attention
from dgpp_deepseek.deepseek41.config import Deepseek41Config
from dgpp_deepseek.deepseek41.config import Experts as Counts
from dgpp_deepseek.deepseek41.engram import Engram, TokenClasses
from dgpp_deepseek.deepseek41.step import Ropes, Step, tail_of

Attend = Callable[[Tensor], Tensor]
"""From what a layer's attention reads, ``[R, width]``, to what it gives, float32."""


def mixture(config: Deepseek41Config, shard: Shard, part: str, counts: Counts) -> Mixture:
    """The routed experts of one layer and a shared one."""
    router = Router(
        shard.weights.matrix(f"{part}.router"), shard.weights.take(f"{part}.router_bias"), counts.met,
        scale=config.routed_scaling_factor, score="sqrt_softplus",
    )  # fmt: skip
    limit = config.swiglu_limit
    experts = Experts.load(shard, f"{part}.experts", experts=counts.count, shared=False, limit=limit)
    return Mixture(shard, router, experts, FeedForward(shard, f"{part}.shared", limit=limit))


class Site:
    """The coefficients of the streams around a sublayer, and the norm of what it reads."""

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str) -> None:
        take = shard.weights.take
        self.norm, self.eps, self.dtype = take(f"{part}_norm"), config.rms_norm_eps, shard.dtype
        self.connection = HyperConnection(
            Linear.load(shard, f"{part}_site.fn"), take(f"{part}_site.base"), take(f"{part}_site.scale"),
            streams=config.hc_mult, eps=config.hc_eps, norm_eps=config.rms_norm_eps, rounds=config.hc_rounds,
        )  # fmt: skip

    def read(self, streams: Tensor, pre: Tensor) -> Tensor:
        """The sublayer's input ``[R, width]`` by the coefficients that the site before this one gave."""
        return rms_norm(collapse(streams, pre).to(self.dtype), self.norm, self.eps, self.dtype)


class Layer:
    """Two sublayers over the streams; ``attention`` is the target's or the drafter's."""

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str, counts: Counts) -> None:
        self.dtype = shard.dtype
        self.attention_site = Site(config, shard, f"{part}.attention")
        self.mlp_site = Site(config, shard, f"{part}.mlp")
        self.mlp = mixture(config, shard, f"{part}.mlp", counts)

    def __call__(self, streams: Tensor, pre: Tensor, attend: Attend, decode: bool) -> tuple[Tensor, Tensor]:
        """Float32 streams ``[R, S, width]``, and the coefficients ``[R, S]`` by which the next site reads them.

        Each site reads by the coefficients that the one before it gave.
        """
        made = self.attention_site.connection(streams, decode)
        streams = self._expanded(streams, attend(self.attention_site.read(streams, pre)), made)
        after = self.mlp_site.connection(streams, decode)
        given = self.mlp.output(self.mlp_site.read(streams, made.pre), decode).to(self.dtype).float()
        streams = self._expanded(streams, given, after)
        return streams, after.pre

    def _expanded(self, streams: Tensor, given: Tensor, made: Coefficients) -> Tensor:
        return expand(streams, given, made).to(self.dtype).float()


def begun(embedded: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """Equal streams, float32 ``[R, S, width]``, and coefficients ``[R, S]`` that read the first."""
    pre = torch.zeros(len(embedded), streams, device=embedded.device)
    pre[:, 0] = 1.0
    return embedded.float().unsqueeze(1).repeat(1, streams, 1), pre


class Deepseek41Model:
    """Implements `dgpp_core.api.Model`.

    A hidden state is what the head reads, before its norm, and beside it the mean of the streams at the entry of each
    layer that the drafter reads.
    """

    def __init__(self, config: Deepseek41Config, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        self.ropes = Ropes(config, shard.device)
        self.embed = Embedding.load(shard, "embed", config.vocab_size)
        self.classes = TokenClasses(config, shard)
        self.engrams, self.layers, self.attentions = dict[int, Engram](), list[Layer](), list[Attention]()
        for index in range(config.layers):
            part = f"layers.{index}"
            if index in config.engram_layers:
                self.engrams[index] = Engram(config, shard, f"{part}.engram", index)
            self.attentions.append(Attention(config, shard, part, index))
            self.layers.append(Layer(config, shard, part, config.experts))
        self.norm, self.head = shard.weights.take("norm"), Linear.load(shard, "head")

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """``[R, hidden_size]``.

        The layers from the last source on keep nothing of a row but its place in their windows: their entries follow
        from the layers before. So a prompt's rows below a floor stop there, once their entries are written.
        """
        config, split = self.config, self.config.split
        whole = Step(msgspec.structs.replace(batch, floors=()), state, self.ropes)
        streams, pre = begun(self.embed[batch.tokens], config.hc_mult)
        streams, pre, _ = self._walk(range(split), streams, pre, whole)
        if not batch.floors:
            return self._finished(streams, pre, whole)
        self.attentions[split].publish(self.layers[split].attention_site.read(streams, pre), whole)
        tail, rows = tail_of(batch)
        hidden = torch.zeros(len(streams), config.hidden_size, dtype=self.dtype, device=streams.device)
        if len(rows):
            hidden[rows] = self._finished(streams[rows], pre[rows], Step(tail, state, self.ropes, published=True))
        return hidden

    def _finished(self, streams: Tensor, pre: Tensor, step: Step) -> Tensor:
        """The layers from the last source on; the rows' hidden states."""
        streams, pre, features = self._walk(range(self.config.split, self.config.layers), streams, pre, step)
        return torch.cat([collapse(streams, pre).to(self.dtype), *features], dim=-1)

    def _walk(self, layers: range, streams: Tensor, pre: Tensor, step: Step) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Streams and coefficients after ``layers``, and what the drafter reads of them."""
        classes = self.classes(step) if layers.start == 0 else None
        features = []
        for index in layers:
            if index in self.config.targets:
                features.append((fold(streams, 1) / self.config.hc_mult).to(self.dtype))
            if index in self.engrams and classes is not None:
                streams = self.engrams[index](streams, classes, step)
            attend = functools.partial(self.attentions[index], step=step)
            streams, pre = self.layers[index](streams, pre, attend, step.decode)
        return streams, pre, features

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``; every rank holds some of the vocabulary's rows."""
        return self.said(hidden[:, : self.config.width], self.norm)

    def said(self, x: Tensor, norm: Tensor) -> Tensor:
        """What the head says of ``[N, width]`` under a norm; the drafter has its own."""
        normed = rms_norm(x.contiguous(), norm, self.config.rms_norm_eps, self.dtype)
        return self.bus.all_gather(self.head.wide(normed), dim=1)
