"""config.json of a DeepSeek-V4.1 checkpoint, its text part."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import ModelConfig, end_tokens, read_section
from dgpp_deepseek.deepseek41.checks import check
from dgpp_deepseek.deepseek41.raw import Quantisation, Root, Text


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """Frequencies of the compressed layers; arguments of `dgpp_core.ops.rope.yarn_frequencies`."""

    factor: float
    length: float
    fast: float
    slow: float


class Experts(msgspec.Struct, frozen=True):
    """``count`` routed experts, of which a row goes to ``met``; a shared one beside them."""

    count: int
    met: int


class Deepseek41Config(ModelConfig, frozen=True, kw_only=True):
    """Shapes and constants; names as in config.json where there is one.

    Attributes:
        hidden_size: of a row's last hidden state: what the head reads, and what the drafter reads beside it.
        width: of one residual stream; ``hidden_size`` in config.json.
        ratios: for each layer the tokens that one compressed entry stands for; 0 where it sees its window alone.
        latent: width of the row that is key and value of all heads; the last ``rope`` of it are turned.
        sources: layers that compress, each for those after it up to the next one.
        choosers: layers that choose among the entries, each for those after it up to the next one.
        block_source: the chooser that also keeps blocks of entries, within which later ones choose.
        blocks, block_size: how many blocks it keeps, and entries of each.
        yarn: of layers that see compressed entries; None where nothing is scaled.
        engram_rows: rows of each n-gram table.
        stages: layers of the drafter.
        targets: layers at whose entry the drafter reads the streams.
        quantised: matrices in 8 bits, experts in 4; otherwise everything is dense.
    """

    width: int
    ratios: tuple[int, ...]
    heads: int
    latent: int
    rope: int
    query_rank: int
    output_rank: int
    output_groups: int
    window: int
    rms_norm_eps: float
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    sources: tuple[int, ...]
    choosers: tuple[int, ...]
    index_heads: int
    index_width: int
    index_topk: int
    block_source: int
    blocks: int
    block_size: int
    hc_mult: int
    hc_rounds: int
    hc_eps: float
    moe_intermediate_size: int
    experts: Experts
    routed_scaling_factor: float
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]
    ngram_size: int
    ngram_base: int
    ngram_heads: int
    ngram_width: int
    ngram_pad: int
    token_classes: int
    stages: int
    draft_block: int
    noise: int
    targets: tuple[int, ...]
    markov_rank: int
    draft_experts: Experts
    quantised: bool

    @property
    def layers(self) -> int:
        """Of the target model."""
        return len(self.ratios)

    @property
    def split(self) -> int:
        """The first layer whose entries follow from the layers before it alone: the last source."""
        return self.sources[-1]

    def source_of(self, layer: int) -> int:
        """The layer whose entries ``layer`` sees."""
        return max(source for source in self.sources if source <= layer)

    def place_of(self, source: int) -> int:
        """Where a source's entries lie in the groups of its ratio."""
        ratio = self.ratios[source]
        return sum(self.ratios[other] == ratio for other in self.sources if other < source)

    @property
    def ngram_slots(self) -> int:
        """Rows of a table that a token looks up: one for each size of n-gram and head."""
        return (self.ngram_size - 1) * self.ngram_heads


def read_config(raw: Mapping[str, Any]) -> Deepseek41Config:
    """Check and read a config.json.

    Raises:
        ConfigError: naming the key that is missing or whose value is not supported.
    """
    root = read_section(raw, Root, "a DeepSeek-V4.1 model")
    check(root)
    return _config(root, root.text_config, root.quantization_config)


def _config(root: Root, t: Text, quantised: Quantisation | None) -> Deepseek41Config:
    scaling = t.rope_scaling
    taken = functools.partial(getattr, t)
    same = (
        "rms_norm_eps", "swiglu_limit", "rope_theta", "compress_rope_theta", "index_topk", "hc_mult", "hc_eps",
        "moe_intermediate_size", "routed_scaling_factor", "vocab_size",
    )  # fmt: skip
    return Deepseek41Config(
        **{name: taken(name) for name in same},
        max_positions=t.max_position_embeddings,
        prefill_tail=t.sliding_window,
        hidden_size=t.hidden_size * (1 + len(t.dspark_target_layer_ids)),
        eos_ids=end_tokens(root.eos_token_id),
        width=t.hidden_size,
        ratios=tuple(t.compress_ratios[: t.num_hidden_layers]),
        heads=t.num_attention_heads,
        latent=t.head_dim,
        rope=t.qk_rope_head_dim,
        query_rank=t.q_lora_rank,
        output_rank=t.o_lora_rank,
        output_groups=t.o_groups,
        window=t.sliding_window,
        yarn=None if scaling is None else Yarn(
            factor=scaling.factor, length=scaling.original_max_position_embeddings, fast=scaling.beta_fast,
            slow=scaling.beta_slow,
        ),
        sources=tuple(t.kv_source_layer_ids),
        choosers=tuple(t.index_source_layer_ids),
        index_heads=t.index_n_heads,
        index_width=t.index_head_dim,
        block_source=t.candidate_source_layer_id,
        blocks=t.candidate_topk_blocks,
        block_size=t.candidate_block_size,
        hc_rounds=t.hc_sinkhorn_iters,
        experts=Experts(t.n_routed_experts, t.num_experts_per_tok),
        engram_layers=tuple(t.engram_layer_ids),
        engram_rows=tuple(t.engram_num_embeddings),
        ngram_size=t.engram_max_ngram_size,
        ngram_base=t.engram_vocab_size,
        ngram_heads=t.engram_n_heads,
        ngram_width=t.engram_head_dim,
        ngram_pad=t.engram_pad_token_id,
        token_classes=t.engram_compressed_vocab_size,
        stages=t.num_nextn_predict_layers,
        draft_block=t.dspark_block_size,
        noise=t.dspark_noise_token_id,
        targets=tuple(t.dspark_target_layer_ids),
        markov_rank=t.dspark_markov_rank,
        draft_experts=Experts(t.dspark_n_routed_experts, t.dspark_num_experts_per_tok),
        quantised=quantised is not None,
    )  # fmt: skip
