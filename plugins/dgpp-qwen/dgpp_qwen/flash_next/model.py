"""The arithmetic of Qwen3.8-Flash-Next, one rank of it."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.embedding import Embedding
from dgpp_core.layers.feed_forward import FeedForward
from dgpp_core.layers.stream import all_ranks
from dgpp_core.ops.activation import sigmoid
from dgpp_core.ops.experts import Experts, combine
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.rope import RotaryTable, yarn_frequencies, yarn_scale
from dgpp_core.ops.router import Router
from dgpp_qwen.flash_next.branches import Mix, Site, add, rows_of
from dgpp_qwen.flash_next.config import FlashNextConfig
from dgpp_qwen.flash_next.encoder import Encoder
from dgpp_qwen.flash_next.mixers import GatedDelta, SparseAttention
from dgpp_qwen.flash_next.ngrams import Ngrams
from dgpp_qwen.flash_next.step import Step
from dgpp_qwen.flash_next.vision import axes


class Mixture:
    """Routed experts, and a shared one under a gate of its own: a slice of each on every rank.

    Args:
        even: no expert is preferred, float32 zeros.
    """

    def __init__(self, config: FlashNextConfig, shard: Shard, part: str, even: Tensor) -> None:
        self.bus = shard.bus
        self.router = Router(
            shard.weights.matrix(f"{part}.router"), even, config.num_experts_per_tok,
            normalise=config.norm_topk_prob, score="softmax",
        )  # fmt: skip
        self.shared_gate = Linear.load(shard, f"{part}.shared_gate")
        self.shared = FeedForward(shard, f"{part}.shared")
        self.experts = Experts.load(shard, f"{part}.experts", experts=config.num_experts, shared=False)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """float32 ``[R, width]``."""
        routing = self.router(x, step.decode)
        routed = combine(self.experts(x, routing, step.decode), routing)
        total = routed + sigmoid(self.shared_gate.wide(x, step.decode)) * self.shared.given(x, step.decode)
        return total if self.bus.world == 1 else all_ranks(self.bus, total.to(x.dtype))


class Layer:
    """A decoder layer: two sublayers, each between a site's mix and its gates."""

    def __init__(
        self, config: FlashNextConfig, shard: Shard, part: str, mixer: GatedDelta | SparseAttention, even: Tensor
    ) -> None:
        self.mixer = mixer
        self.attention_site = Site(config, shard, f"{part}.attention_site")
        self.mlp_site = Site(config, shard, f"{part}.mlp_site")
        self.mlp = Mixture(config, shard, f"{part}.mlp", even)

    def __call__(self, branches: Tensor, step: Step) -> Tensor:
        """float32 ``[R, B, width]`` to the same."""
        x, gates = self.attention_site.read(branches, step.decode)
        branches = add(branches, gates, self.mixer(x, step))
        x, gates = self.mlp_site.read(branches, step.decode)
        return add(branches, gates, self.mlp(x, step))


def _rotary(config: FlashNextConfig, device: torch.device) -> RotaryTable:
    theta, width, yarn = config.rope_theta, config.rotary_dim, config.yarn
    frequencies, scale = None, 1.0
    if yarn is not None:
        frequencies = yarn_frequencies(width, theta, yarn.factor, yarn.length, yarn.fast, yarn.slow)
        scale = yarn_scale(yarn.factor) * yarn.attention if yarn.scale is None else yarn.scale
    turned = () if config.encoding is None else axes(config.encoding.sections)
    return RotaryTable(width, config.max_positions, theta, device, frequencies, scale, turned)


class FlashNextModel:
    """Implements `dgpp_core.api.Model`; its hidden states are all branches after the last layer, not yet mixed."""

    def __init__(self, config: FlashNextConfig, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        encoding = config.encoding
        self.rope = _rotary(config, shard.device)
        self.encoder = None if encoding is None else Encoder(encoding, shard)
        self.even = torch.zeros(config.num_experts, device=shard.device)
        self.embed = Embedding.load(shard, "embed", config.vocab_size)
        self.ngrams = Ngrams(config, shard)
        self.layers = [self._layer(shard, index) for index in range(config.layers)]
        self.mixer, self.head = Mix(config, shard, "mixer"), Linear.load(shard, "head")

    def _layer(self, shard: Shard, index: int) -> Layer:
        part, sparse = f"layers.{index}", self.config.sparse
        place = sum(kind == sparse[index] for kind in sparse[:index])
        mixer: GatedDelta | SparseAttention
        if sparse[index]:
            mixer = SparseAttention(self.config, shard, part, place, self.rope)
        else:
            mixer = GatedDelta(self.config, shard, part, place)
        return Layer(self.config, shard, part, mixer, self.even)

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """``[R, B * width]``."""
        step = Step.of(batch, state)
        embedded = self.embed[batch.tokens]
        if batch.seen is not None:
            embedded = embedded.index_copy(0, batch.seen.rows, batch.seen.values.to(embedded.dtype))
        branches = embedded.float().unsqueeze(1).repeat(1, self.config.hc_count, 1)
        for index, layer in enumerate(self.layers):
            if index == self.config.ple_layer:
                branches = self.ngrams(branches, step)
            branches = layer(branches, step)
        return branches.flatten(1).to(self.dtype)

    def see(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """An image, ``[rows * columns, width]``, with rank 0's bits: see `dgpp_core.api.Seeing`."""
        assert self.encoder is not None, "the plugin says that such a checkpoint takes no images"
        seen = self.encoder(patches, rows, columns)
        # A BLAS may add in another order on another rank, and ranks must choose the same blocks and experts.
        return self.bus.all_reduce(seen if self.bus.rank == 0 else torch.zeros_like(seen))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``."""
        return self.mixed_logits(self.mixer, hidden)

    def mixed_logits(self, mix: Mix, hidden: Tensor) -> Tensor:
        """What the output head says of hidden states under a mix; the draft layer has its own.

        Every rank holds some of the vocabulary's rows.
        """
        return self.bus.all_gather(self.head.wide(mix(rows_of(hidden, self.config), True)), dim=1)
