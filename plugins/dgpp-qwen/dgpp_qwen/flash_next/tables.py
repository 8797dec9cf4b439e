"""The binding table and the state groups of Qwen3.8-Flash-Next."""

from __future__ import annotations

from collections.abc import Iterator

from dgpp_core.api import (
    Binding,
    BindingTable,
    ConfigError,
    Init,
    Lookup,
    PagedGroup,
    RecurrentGroup,
    Stack,
    StateGroup,
    WindowGroup,
)
from dgpp_qwen.flash_next.config import FlashNextConfig
from dgpp_qwen.flash_next.hashing import constants
from dgpp_qwen.flash_next.vision import encoder_bindings

TEXT = "model.language_model"
NORM = Init(std=0.2)
"""Of a norm whose weight is stored as its distance from 1."""
EMBEDDED = Init(std=0.5)
ROUNDABLE = (
    "layers.*.in", "layers.*.out", "draft.layer.in", "draft.layer.out", "*.mlp.shared.*", "*_site.down", "*_site.up",
    "mixer.*", "draft.mixer.*", "ple.in", "head",
)  # fmt: skip
"""All dense matrices but routers and gates, a delta rule's rates, and what joins branches and token in a draft."""


def _vector(
    name: str, shape: tuple[int, ...], target: str, init: Init = NORM, *, cut: int | None = None,
    fused: tuple[int, ...] = (),
) -> Binding:  # fmt: skip
    return Binding(name=name, shape=shape, target=target, role="vector", init=init, cut=cut, fused=fused)


def _matrix(
    name: str, shape: tuple[int, int], target: str, *, storage: str = "dense", gain: float = 1.0,
    cut: int | None = None, fused: tuple[int, ...] = (), heads: int = 0,
) -> Binding:  # fmt: skip
    return Binding(
        name=f"{name}.weight", shape=shape, target=target, storage=storage, init=Init(std=gain * shape[1] ** -0.5),
        cut=cut, fused=fused, heads=heads,
    )  # fmt: skip


class _Tables:
    """Bindings of one config, part by part."""

    def __init__(self, config: FlashNextConfig) -> None:
        self.c = config

    def site(self, name: str, to: str, *, inject: bool = True) -> Iterator[Binding]:
        """Where branches are mixed into a sublayer's input; with ``inject``, how its output goes back into each."""
        c = self.c
        yield _vector(f"{name}.hc_norm.weight", (c.hidden_size,), f"{to}.norm")
        yield _matrix(f"{name}.input_mix_weight_down", (c.hc_lowrank, c.hidden_size), f"{to}.down")
        if inject:
            yield _matrix(f"{name}.block_inject_weight", (c.hc_count, c.hidden_size), f"{to}.down", gain=2.0)
        yield _matrix(f"{name}.input_mix_weight_up", (c.hidden_size, c.hc_lowrank), f"{to}.up", gain=2.0)

    def delta(self, name: str, to: str) -> Iterator[Binding]:
        """A gated delta layer. Ranks divide its heads, those of keys with their values.

        The products of what is mixed are one, and those of how fast it is forgotten and learned another.
        """
        c, heads, fused = self.c, self.c.linear_num_value_heads, (self.c.key_size, self.c.key_size, self.c.value_size)
        yield _matrix(f"{name}.in_proj_qkv", (c.channels, c.width), f"{to}.in", cut=0, fused=fused)
        yield _matrix(f"{name}.in_proj_z", (c.value_size, c.width), f"{to}.in", cut=0)
        for part in ("a", "b"):
            yield _matrix(f"{name}.in_proj_{part}", (heads, c.width), f"{to}.rates", cut=0)
        shape, init = (c.channels, 1, c.linear_conv_kernel_dim), Init(std=c.linear_conv_kernel_dim**-0.5)
        yield _vector(f"{name}.conv1d.weight", shape, f"{to}.conv", init, cut=0, fused=fused)
        yield _vector(f"{name}.A_log", (heads,), f"{to}.a_log", Init(std=0.8, mean=-0.5), cut=0)
        yield _vector(f"{name}.dt_bias", (heads,), f"{to}.dt_bias", Init(std=0.8, mean=-1.5), cut=0)
        yield _vector(f"{name}.norm.weight", (c.linear_value_head_dim,), f"{to}.norm", Init(std=0.2, mean=1.0))
        yield _matrix(f"{name}.out_proj", (c.width, c.value_size), f"{to}.out", cut=1)

    def sparse(self, name: str, to: str) -> Iterator[Binding]:
        """A block-sparse attention layer; queries with their gates, keys, values and the indexer's are one product.

        Ranks divide the heads; each has the whole indexer, and so chooses the same blocks.
        """
        c, heads = self.c, self.c.num_key_value_heads
        yield _matrix(f"{name}.q_proj", (2 * c.query_size, c.width), f"{to}.in", cut=0)
        for part in ("k_proj", "v_proj"):
            yield _matrix(f"{name}.{part}", (c.key_value_size, c.width), f"{to}.in", cut=0, heads=heads)
        index = (c.indexer_n_heads + 1) * c.indexer_head_dim
        yield _matrix(f"{name}.indexer.index_qk_proj", (index, c.width), f"{to}.in")
        for norm in ("q_norm", "k_norm"):
            yield _vector(f"{name}.{norm}.weight", (c.head_dim,), f"{to}.{norm}")
        for norm in ("q", "k"):
            size = (c.indexer_head_dim,)
            yield _vector(f"{name}.indexer.{norm}_layernorm.weight", size, f"{to}.index_{norm}_norm")
        yield _matrix(f"{name}.o_proj", (c.width, c.query_size), f"{to}.out", cut=1)

    def mixture(self, name: str, to: str, storage: str) -> Iterator[Binding]:
        """Router, shared expert with its gate, and the routed experts."""
        c = self.c
        yield _matrix(f"{name}.gate", (c.num_experts, c.width), f"{to}.router", gain=2.0)
        yield _matrix(f"{name}.shared_expert_gate", (1, c.width), f"{to}.shared_gate")
        yield from self.expert(f"{name}.shared_expert", f"{to}.shared", c.shared_expert_intermediate_size, "dense")
        for e in range(c.num_experts):
            yield from self.expert(f"{name}.experts.{e}", f"{to}.experts", c.moe_intermediate_size, storage)

    def expert(self, name: str, to: str, size: int, storage: str) -> Iterator[Binding]:
        """Gate over up, and down."""
        for part in ("gate", "up"):
            yield _matrix(f"{name}.{part}_proj", (size, self.c.width), f"{to}.gate_up", storage=storage, cut=0)
        yield _matrix(f"{name}.down_proj", (self.c.width, size), f"{to}.down", storage=storage, cut=1)

    def layer(self, name: str, to: str, *, sparse: bool, storage: str) -> Iterator[Binding]:
        """A decoder layer."""
        yield from self.site(f"{name}.attn_hyper_connection", f"{to}.attention_site")
        yield from self.sparse(f"{name}.self_attn", to) if sparse else self.delta(f"{name}.linear_attn", to)
        yield from self.site(f"{name}.mlp_hyper_connection", f"{to}.mlp_site")
        yield from self.mixture(f"{name}.mlp", f"{to}.mlp", storage)

    def ngrams(self, name: str) -> Iterator[Binding]:
        """The n-gram table, its constants, and what turns its rows into something to add to the branches."""
        c, k = self.c, constants(self.c)
        table = f"{name}.ple_embedding"
        for part, values in (
            ("layer_multipliers", k.multipliers), ("ngram_heads_vocab_sizes", k.sizes),
            ("ngram_heads_offsets", k.offsets),
        ):  # fmt: skip
            yield Binding(
                name=f"{table}.{part}", shape=(len(values),), target=f"ple.{part}", role="vector", formats=("I64",),
                init=Init(values=values),
            )  # fmt: skip
        yield from self.shards(f"{table}.ngram_embedding", k.rows)
        yield _matrix(f"{name}.key_proj", (c.hidden_size, c.ple_embed_dim), "ple.in")
        yield _matrix(f"{name}.value_proj", (c.width, c.ple_embed_dim), "ple.in")
        for norm in ("key", "query", "conv"):
            yield _vector(f"{name}.norm_{norm}.weight", (c.hidden_size,), f"ple.{norm}_norm")
        taps = c.ple_conv_kernel_size
        yield _vector(f"{name}.conv1d.weight", (c.hidden_size, 1, taps), "ple.conv", Init(std=taps**-0.5))

    def shards(self, name: str, rows: int) -> Iterator[Binding]:
        """The table in equal pieces, the last one with what is left; 8-bit rows share one scale. Ranks divide each."""
        c, width = self.c, self.c.ple_embed_dim // self.c.ngram_heads
        most, eight = -(-rows // c.ngram_parts), c.storages.table
        init = Init(std=8.0) if eight else EMBEDDED
        for shard in range(c.ngram_parts):
            held = min(most, rows - shard * most)
            yield Binding(
                name=f"{name}.shard_{shard}.weight", shape=(held, width), target="ple.table", role="embedding", cut=0,
                formats=("F8_E4M3",) if eight else ("F32", "BF16", "F16"), init=init,
            )  # fmt: skip
        if eight:
            yield _vector(f"{name}.weight_scale", (1,), "ple.scale", Init(std=0.0, mean=0.0625))

    def draft(self) -> Iterator[Binding]:
        """The multi-token-prediction layer; embedding and head are the target's."""
        c = self.c
        yield _vector("mtp.pre_fc_norm_embedding.weight", (c.width,), "draft.embedding_norm")
        yield _vector("mtp.pre_fc_norm_hidden.weight", (c.hidden_size,), "draft.hidden_norm")
        yield _matrix("mtp.fc_embedding", (c.width, c.width), "draft.embedding")
        yield _matrix("mtp.fc_hidden", (c.width, c.width), "draft.hidden")
        yield from self.layer("mtp.layers.0", "draft.layer", sparse=True, storage=c.storages.draft_experts)
        yield from self.site("mtp.hyper_connection_mixer", "draft.mixer", inject=False)


def bindings(c: FlashNextConfig) -> BindingTable:
    """Every tensor of the model and its drafter; those of an encoder that is not used are passed over."""
    tables, vocabulary, out = _Tables(c), (c.vocab_size, c.width), list[Binding]()
    out.append(
        Binding(name=f"{TEXT}.embed_tokens.weight", shape=vocabulary, target="embed", role="embedding", init=EMBEDDED)
    )
    for index, sparse in enumerate(c.sparse):
        if index == c.ple_layer:
            out += tables.ngrams(f"{TEXT}.layers.{index}.ple")
        out += tables.layer(f"{TEXT}.layers.{index}", f"layers.{index}", sparse=sparse, storage=c.storages.experts)
    out += tables.site(f"{TEXT}.hyper_connection_mixer", "mixer", inject=False)
    out.append(_matrix("lm_head", vocabulary, "head", cut=0))
    out += tables.draft()
    if c.encoding is not None:
        out += encoder_bindings(c.encoding)
    ignored = (
        *(("model.visual.*",) if c.encoding is None else ()),
        "*.hyper_connection_mixer.block_inject_weight.weight",
        "*.rotary_emb.inv_freq",
    )
    homes = (*(f"layers.{index}" for index in range(c.layers)), "draft.layer")
    stacks = tuple(
        Stack(f"{home}.mlp.experts.{part}", c.num_experts, c.num_experts_per_tok)
        for home in homes
        for part in ("gate_up", "down")
    )
    lookups = (Lookup("ple.table", c.ngram_heads),)
    return BindingTable(
        tuple(out), ignored, stacks=stacks, draft=("draft.*",), lookups=lookups, divisible=("embed",),
        roundable=ROUNDABLE,
    )  # fmt: skip


def groups(c: FlashNextConfig, world: int) -> tuple[StateGroup, ...]:
    """What a request keeps on one of ``world`` ranks; of the sparse layers' groups the draft layer has the last.

    Raises:
        ConfigError: so many ranks cannot share the model.
    """
    _require_ranks(c, world)
    heads = max(1, c.num_key_value_heads // world)
    sparse, ratio = sum(c.sparse) + 1, c.indexer_compress_ratio
    delta = c.layers - sparse + 1
    kept = (c.linear_num_value_heads // world, c.linear_key_head_dim, c.linear_value_head_dim)
    reach = (c.ple_conv_kernel_size - 1) * c.ngram_size

    def paged(name: str, heads: int, width: int) -> PagedGroup:
        return PagedGroup(name=name, layers=sparse, heads=heads, width=width, dtype="compute")

    def window(name: str, layers: int, width: int, rows: int) -> WindowGroup:
        return WindowGroup(name=name, layers=layers, heads=1, width=width, window=rows, dtype="compute")

    return (
        paged("k", heads, c.head_dim),
        paged("v", heads, c.head_dim),
        paged("index", 1, c.indexer_head_dim // ratio),
        window("index_tail", sparse, c.indexer_head_dim, ratio - 1),
        window("conv", delta, c.channels // world, c.linear_conv_kernel_dim - 1),
        RecurrentGroup(name="delta", layers=delta, shape=kept),
        window("ngram_rows", 1, c.hidden_size, reach),
        WindowGroup(name="ngram_ids", layers=1, heads=1, width=1, window=c.ngram_size - 1, dtype="int64"),
    )


def _require_ranks(c: FlashNextConfig, world: int) -> None:
    """Whole heads, equal slices of experts and of the table's pieces; of keys and values ranks may share a head."""
    wanted = {
        "num_attention_heads": c.num_attention_heads, "linear_num_key_heads": c.linear_num_key_heads,
        "moe_intermediate_size": c.moe_intermediate_size, "vocab_size": c.vocab_size,
        "shared_expert_intermediate_size": c.shared_expert_intermediate_size,
    }  # fmt: skip
    undivided = [f"{name} {size}" for name, size in wanted.items() if size % world]
    if c.num_key_value_heads % world and world % c.num_key_value_heads:
        undivided.append(f"num_key_value_heads {c.num_key_value_heads}")
    if world > 1 and (rows := constants(c).rows) % (c.ngram_parts * world):
        undivided.append(f"{c.ngram_parts} pieces of {rows} rows of n-grams")
    if undivided:
        raise ConfigError(
            f"{world} ranks cannot share the model", where="world_size", found=", ".join(undivided),
            expected=f"what {world} divides", hint="choose 1, 2 or 4 ranks",
        )  # fmt: skip
