"""The binding table of DeepSeek-V4.1-Flash."""

from __future__ import annotations

from collections.abc import Iterator

from dgpp_core.api import Binding, BindingTable, Init, Lookup, Stack
from dgpp_deepseek.deepseek41.config import Deepseek41Config, Experts
from dgpp_deepseek.deepseek41.hashing import HashConstants, hash_constants, require_rows

SIDECAR = "engram.token_classes"
"""The tensor that no release has and that ``dgpp engram-classes`` makes of the tokenizer."""

FLOAT32 = ("F32",)


def constants_of(c: Deepseek41Config) -> tuple[HashConstants, ...]:
    """Of every Engram layer; raises `ConfigError` where config.json counts the tables' rows otherwise."""
    made = hash_constants(c.engram_layers, c.ngram_size, c.ngram_heads, c.ngram_base, c.token_classes)
    require_rows(c.engram_rows, made)
    return made


def _norm(name: str, size: int, target: str) -> Binding:
    return Binding(name=f"{name}.weight", shape=(size,), target=target, role="vector", init=Init(std=0.1, mean=1.0))


def _vector(name: str, shape: tuple[int, ...], target: str, init: Init, cut: int | None = None) -> Binding:
    """A vector that stays in float32."""
    return Binding(name=name, shape=shape, target=target, role="vector", formats=FLOAT32, init=init, cut=cut)


def _dense(name: str, shape: tuple[int, int], target: str, *, cut: int | None = None, gain: float = 1.0) -> Binding:
    """A matrix that the release does not quantise."""
    init = Init(std=gain * shape[1] ** -0.5)
    return Binding(name=f"{name}.weight", shape=shape, target=target, cut=cut, init=init)


class _Tables:
    """Bindings of one config, part by part."""

    def __init__(self, config: Deepseek41Config) -> None:
        self.c = config
        self.eight, self.four = ("fp8_e8m0_32", "mxfp4") if config.quantised else ("dense", "dense")

    def matrix(
        self, name: str, shape: tuple[int, int], target: str, *, cut: int | None = None, storage: str = ""
    ) -> Binding:
        """A matrix that the release keeps in 8 bits, or in ``storage``."""
        return Binding(
            name=f"{name}.weight", shape=shape, target=target, cut=cut, init=Init(std=shape[1] ** -0.5),
            storage=storage or self.eight,
        )  # fmt: skip

    def layer(self, name: str, to: str, layer: int | None, experts: Experts) -> Iterator[Binding]:
        """A layer of the target model, or with ``layer`` None one of the drafter."""
        c = self.c
        if layer in c.engram_layers:
            yield from self.engram(f"{name}.engram", f"{to}.engram", c.engram_rows[c.engram_layers.index(layer)])
        yield from self.connection(f"{name}.hc_attn", f"{to}.attention_site")
        yield _norm(f"{name}.attn_norm", c.width, f"{to}.attention_norm")
        yield from self.attention(f"{name}.attn", to)
        if layer in c.sources:
            yield from self.compressor(f"{name}.attn", f"{to}.compressor", c.ratios[layer])
        if layer in c.choosers:
            yield from self.indexer(f"{name}.attn.indexer", f"{to}.indexer")
        yield from self.connection(f"{name}.hc_ffn", f"{to}.mlp_site")
        yield _norm(f"{name}.ffn_norm", c.width, f"{to}.mlp_norm")
        yield from self.mixture(f"{name}.ffn", f"{to}.mlp", experts)

    def connection(self, name: str, to: str) -> Iterator[Binding]:
        """Coefficients of the residual streams around one sublayer."""
        c, values = self.c, self.c.hc_mult * (2 + self.c.hc_mult)
        size = c.hc_mult * c.width
        yield Binding(name=f"{name}_fn", shape=(values, size), target=f"{to}.fn", init=Init(std=size**-0.5))
        yield _vector(f"{name}_base", (values,), f"{to}.base", Init(std=0.5))
        yield _vector(f"{name}_scale", (3,), f"{to}.scale", Init(std=0.2, mean=0.8))

    def attention(self, name: str, to: str) -> Iterator[Binding]:
        """Ranks take whole groups of heads."""
        c = self.c
        queries, grouped = c.heads * c.latent, c.output_groups * c.output_rank
        yield self.matrix(f"{name}.wq_a", (c.query_rank, c.width), f"{to}.query_latent")
        yield _norm(f"{name}.q_norm", c.query_rank, f"{to}.query_norm")
        yield self.matrix(f"{name}.wq_b", (queries, c.query_rank), f"{to}.queries", cut=0)
        yield self.matrix(f"{name}.wkv", (c.latent, c.width), f"{to}.rows")
        yield _norm(f"{name}.kv_norm", c.latent, f"{to}.row_norm")
        yield _vector(f"{name}.attn_sink", (c.heads,), f"{to}.sinks", Init(std=1.0), cut=0)
        yield self.matrix(f"{name}.wo_a", (grouped, queries // c.output_groups), f"{to}.output_groups", cut=0)
        yield self.matrix(f"{name}.wo_b", (c.width, grouped), f"{to}.output", cut=1)

    def compressor(self, name: str, to: str, ratio: int) -> Iterator[Binding]:
        """Of a source: what makes entries and their index keys; more tokens an entry have gates."""
        c = self.c
        for part in ("wkv", "wgate")[: min(ratio, 2)]:
            yield _dense(f"{name}.compressor.{part}", (c.latent, c.width), f"{to}.products")
        yield _norm(f"{name}.compressor.norm", c.latent, f"{to}.norm")
        yield _dense(f"{name}.indexer.wk", (c.index_width, c.latent), f"{to}.key")
        yield _norm(f"{name}.indexer.k_norm", c.index_width, f"{to}.key_norm")

    def indexer(self, name: str, to: str) -> Iterator[Binding]:
        """Whole on every rank: all choose alike."""
        c = self.c
        yield self.matrix(f"{name}.wq_b", (c.index_heads * c.index_width, c.query_rank), f"{to}.queries")
        yield _dense(f"{name}.weights_proj", (c.index_heads, c.width), f"{to}.weights")

    def engram(self, name: str, to: str, rows: int) -> Iterator[Binding]:
        """An n-gram table and what makes keys and a value of its rows; ranks take slots."""
        c, eight = self.c, self.c.quantised
        yield Binding(
            name=f"{name}.embed.weight", shape=(rows, c.ngram_width), target=f"{to}.table", role="embedding",
            formats=("F8_E4M3",) if eight else ("F32", "BF16", "F16"), init=Init(std=8.0 if eight else 1.0),
        )  # fmt: skip
        if eight:
            yield Binding(
                name=f"{name}.embed.scale", shape=(rows, c.ngram_width // 32), target=f"{to}.scales", role="embedding",
                formats=("F8_E8M0",), init=Init(std=0.0, mean=0.125),
            )  # fmt: skip
        shape = ((c.hc_mult + 1) * c.width, c.ngram_slots * c.ngram_width)
        yield self.matrix(f"{name}.wkv", shape, f"{to}.products", cut=1)
        for part in ("q", "k"):
            yield Binding(
                name=f"{name}.{part}_weight", shape=(c.hc_mult, c.width), target=f"{to}.{part}_weight", role="vector",
                init=Init(std=0.1, mean=1.0),
            )  # fmt: skip

    def mixture(self, name: str, to: str, experts: Experts) -> Iterator[Binding]:
        """Router, routed experts and the shared one."""
        c, size = self.c, self.c.moe_intermediate_size
        yield _dense(f"{name}.gate", (experts.count, c.width), f"{to}.router", gain=2.0)
        yield _vector(f"{name}.gate.bias", (experts.count,), f"{to}.router_bias", Init(std=0.1))
        for part in ("w1", "w3"):
            yield self.matrix(f"{name}.shared_experts.{part}", (size, c.width), f"{to}.shared.gate_up", cut=0)
        yield self.matrix(f"{name}.shared_experts.w2", (c.width, size), f"{to}.shared.down", cut=1)
        for expert in range(experts.count):
            home, four = f"{name}.experts.{expert}", self.four
            for part in ("w1", "w3"):
                yield self.matrix(
                    f"{home}.{part}", (size, c.width), f"{to}.experts.gate_up", cut=0, storage=four
                )  # fmt: skip
            yield self.matrix(f"{home}.w2", (c.width, size), f"{to}.experts.down", cut=1, storage=four)

    def drafter(self) -> Iterator[Binding]:
        """Its layers, what it reads of the target, and the heads that make tokens of its block."""
        c, last = self.c, f"mtp.{self.c.stages - 1}"
        yield self.matrix("mtp.0.main_proj", (c.width, len(c.targets) * c.width), "draft.main")
        yield _norm("mtp.0.main_norm", c.width, "draft.main_norm")
        for stage in range(c.stages):
            yield from self.layer(f"mtp.{stage}", f"draft.{stage}", None, c.draft_experts)
        yield _norm(f"{last}.norm", c.width, "draft.norm")
        size, markov = (c.vocab_size, c.markov_rank), f"{last}.markov_head"
        yield Binding(
            name=f"{markov}.embed.weight", shape=size, target="draft.markov_embed", role="embedding", init=Init(std=1.0)
        )
        yield _dense(f"{markov}.head", size, "draft.markov_head", cut=0)
        yield _dense(f"{last}.confidence_head.proj", (1, c.width + c.markov_rank), "draft.confidence")


IGNORED = ("vision.*", "aligner.*", "image_start", "image_end", "image_newline", "*.ffn.gate.bias_vl")
"""The encoder of images, and the routers' bias for their tokens."""


def bindings(c: Deepseek41Config) -> BindingTable:
    """Every tensor of the text model, in the order in which the model and its drafter take their parameters.

    Raises:
        ConfigError: the n-gram tables have another number of rows than their hashes.
    """
    constants_of(c)
    tables, vocabulary = _Tables(c), (c.vocab_size, c.width)
    classes = tuple(token if token < c.token_classes else token % c.token_classes for token in range(c.vocab_size))
    out = [
        Binding(name="embed.weight", shape=vocabulary, target="embed", role="embedding", init=Init(std=0.5)),
        Binding(
            name=SIDECAR, shape=(c.vocab_size,), target=SIDECAR, role="vector", formats=("I64",),
            init=Init(values=classes), hint="make it of the checkpoint's tokenizer: dgpp engram-classes CHECKPOINT",
        ),
    ]  # fmt: skip
    for layer in range(c.layers):
        out += tables.layer(f"layers.{layer}", f"layers.{layer}", layer, c.experts)
    out += [_norm("norm", c.width, "norm"), _dense("head", vocabulary, "head", cut=0)]
    out += tables.drafter()
    homes = [(f"layers.{layer}", c.experts) for layer in range(c.layers)]
    homes += [(f"draft.{stage}", c.draft_experts) for stage in range(c.stages)]
    stacks = tuple(
        Stack(f"{home}.mlp.experts.{part}", experts.count, experts.met)
        for home, experts in homes
        for part in ("gate_up", "down")
    )
    lookups = tuple(
        Lookup(f"layers.{layer}.engram.{part}", c.ngram_slots)
        for layer in c.engram_layers
        for part in (("table", "scales") if c.quantised else ("table",))
    )
    return BindingTable(
        tuple(out), IGNORED, stacks=stacks, draft=("draft.*",), divisible=("embed",), lookups=lookups
    )  # fmt: skip
