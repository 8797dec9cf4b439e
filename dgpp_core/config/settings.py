"""The settings of an engine and its HTTP service, and the deployment file that holds them.

The field types carry the parse ranges, so that the parser, the command line and the documentation read one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.vision import SEEN_TOKENS
from dgpp_core.config.rules import ip_address
from dgpp_core.config.strict import convert, parse_json, read_text

Port = Annotated[int, Meta(ge=1, le=65535)]
Bytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**30)]
Positive = Annotated[int, Meta(ge=1, le=2**30)]
Depth = Annotated[int, Meta(ge=1, le=5)]

AUTOMATIC_PREFILL_TOKENS = 256
"""Prompt tokens a tick where ``prefill_budget_tokens`` is -1."""

GPU_PREFILL_TOKENS, GPU_IDLE_PREFILL_TOKENS = 512, 2048
"""The same on a GPU, beside running decodes and while there are none. Fewer rows than these read a mixture's weights as
often, and leave the card's tensor cores idle."""


class FileInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files attached to requests.

    ``directory`` keeps uploads (empty: a temporary one), ``pdf_command`` turns a PDF into text within
    ``pdf_timeout_ms``, ``workers`` do so at once; ``max_file_bytes``, ``max_request_bytes``, ``max_text_bytes`` and
    ``max_storage_bytes`` bound a file, a request's files, extracted text and the store.
    """

    directory: str = ""
    pdf_command: str = "pdftotext"
    max_file_bytes: Bytes = 52_428_800
    max_request_bytes: Bytes = 52_428_800
    max_text_bytes: Bytes = 134_217_728
    max_storage_bytes: Bytes = 1_073_741_824
    pdf_timeout_ms: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 120_000
    workers: Annotated[int, Meta(ge=1, le=256)] = 4


class ImageInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images in requests, for models that take them.

    ``max_images``, ``max_request_pixels`` and ``max_request_bytes`` bound a request's images: their number, their
    pixels as they are sent, and their bytes once resized. ``max_file_bytes``, ``max_side`` and ``max_pixels`` bound
    one. An image is scaled down to ``max_tokens``, or ``max_tokens_low`` with `detail: low`; more than the upper end of
    the range is not planned for. ``workers`` images are decoded at once.
    """

    max_images: Annotated[int, Meta(ge=1, le=10_000)] = 100
    max_file_bytes: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 20 << 20
    max_side: Annotated[int, Meta(ge=1, le=2**16 - 1)] = 16_384
    max_pixels: Annotated[int, Meta(ge=1, le=2**30)] = 32 << 20
    max_request_pixels: Annotated[int, Meta(ge=1, le=2**40)] = 512 << 20
    max_request_bytes: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 256 << 20
    max_tokens: Annotated[int, Meta(ge=64, le=SEEN_TOKENS)] = SEEN_TOKENS
    max_tokens_low: Annotated[int, Meta(ge=64, le=SEEN_TOKENS)] = 256
    workers: Annotated[int, Meta(ge=1, le=256)] = 2


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """YaRN over the checkpoint's rotary embedding: lifts the positional ceiling to original x factor."""

    factor: Annotated[float, Meta(gt=0, le=2**20)]
    original_max_position_embeddings: Annotated[int, Meta(ge=1, le=2**40)]
    rope_type: Literal["yarn"] | UnsetType = UNSET
    type: Literal["yarn"] | UnsetType = UNSET
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attn_factor: float = 1.0
    mrope_cache_factor: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.rope_type is UNSET) == (self.type is UNSET):
            raise ValueError("rope_type: (or its other name `type`) must be given, once")


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much an engine holds and how it computes. Defaults serve a small model on a laptop's CPU.

    Where they part from the predecessor's: ``mtp`` is on, needs no graph and has no effect without a drafter;
    ``prefill_budget_tokens`` is automatic, since a whole prompt in one piece stalls every running reply.
    Keys that nothing acts on are checked all the same, and named by `without_effect`.

    Capacity:
        max_concurrency: slots, requests that run at once.
        kv_capacity: tokens the KV pool holds, rounded up to ``block_tokens``.
        block_tokens: tokens a KV block; the unit of prefix sharing.
        decode_context_parallel: among how many ranks KV blocks are divided, where a model can; 1: each has all.
        kv_dtype: the form of the cache, where a model has several.
        embed_sharding: whether every rank has the whole embedding or, where a model can, a share of it.
        default_max_tokens: reply limit where a request names none.
        queue_limit: requests that wait for a slot before the next gets a 503.
        max_connections: open HTTP connections.
        prefix_cache_gib: snapshots of window and recurrent state; paged blocks are cached in the pool itself. 0 turns
            prefix reuse off for both.
        prefix_min_tokens: no snapshot of window and recurrent state below this position.
        prefix_head_snapshots: one at the end of a prompt's first message, for other conversations that begin so.
        admission: ``full`` reserves prompt and reply, ``grow`` a window of ``admission_window`` tokens at a time.
        prefill_budget_tokens: prompt tokens a tick while replies run; -1 automatic, 0 the whole prompt.
        prefill_idle_budget_tokens: the same while none runs; 0 uses the busy budget.
        admission_gather_ms: how long an idle engine waits for company of its first arrival.
        file_inputs: limits on files in requests.
        image_inputs: limits on images in requests.
        model_alias: the served model id, where it is not the model's own.
        reasoning_in_content: reasoning stays in the text instead of a field of its own.
        no_eos: replies run to their limit (for measuring).
        stats_interval_s: seconds between statistics lines; 0 is off.
    Execution:
        pipeline: on a GPU, launch the next step before the host has read the last one.
        decode_graph: on a GPU, run decode steps from captured graphs.
        graph_batch_min_live: fewest requests that share a graph.
        mtp, mtp_depth: drafting and the most tokens drafted a step.
        mtp_schedule: verify as many drafts as pay, by how sure the drafter is, or else how many stood lately.
        mtp_draft, mtp_draft_temperature, mtp_verify: how sampled requests are drafted for.
        mtp_expert_format: of a draft layer's experts in the checkpoint.
        compact_batches: whether steps take a smaller graph where one holds their requests.
        sampling_candidates: candidates kept by the sampler's first pass.
        prefill: whether all rows of a prompt go through every layer, for families that can do with less.
        bf16_weights: on a GPU, keep BF16 matrices as they are or in 12 bits a weight, without loss.
        ngram_table: whether tables of n-grams lie in memory, or their rows are read from the checkpoint's files.
        dense_weights: whether a model that can keeps the dense matrices of its layers in 8 bits; replies change by it.
        fp8_head: a form that single families offer.
        rope_scaling: YaRN, for families that take it.
        bulk_pace_gbps: Gbit/s that a rank sends each other one at most over RDMA; 0 no limit, below 0 derived.
        bulk_inflight, rendezvous_timeout_ms: transport between ranks.
    """

    max_concurrency: Annotated[int, Meta(ge=1, le=2**20)] = 8
    kv_capacity: Annotated[int, Meta(ge=1, le=2**40)] = 8192
    block_tokens: Annotated[int, Meta(ge=1, le=4096)] = 64
    decode_context_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    kv_dtype: Literal["bf16", "fp8", "fp4"] = "bf16"
    embed_sharding: Literal["replicated", "vocab"] = "replicated"
    default_max_tokens: Positive = 256
    queue_limit: Positive = 64
    max_connections: Annotated[int, Meta(ge=1, le=2**20)] = 64
    prefix_cache_gib: Annotated[float, Meta(ge=0, le=2**20)] = 1.5
    prefix_min_tokens: Natural = 1024
    prefix_head_snapshots: bool = True
    admission: Literal["full", "grow"] = "full"
    admission_window: Positive = 256
    prefill_budget_tokens: Annotated[int, Meta(ge=-1, le=2**30)] = -1
    prefill_idle_budget_tokens: Natural = 0
    admission_gather_ms: Annotated[int, Meta(ge=0, le=1000)] = 3
    file_inputs: FileInputs = FileInputs()
    image_inputs: ImageInputs = ImageInputs()
    model_alias: str = ""
    reasoning_in_content: bool = False
    no_eos: bool = False
    stats_interval_s: Annotated[float, Meta(ge=0, le=2**30)] = 10.0
    pipeline: bool = True
    decode_graph: bool = True
    mtp: bool = True
    mtp_depth: Depth = 1
    mtp_schedule: bool = False
    mtp_schedule_row_ms: Annotated[float, Meta(gt=0, le=2**30)] = 8.0
    mtp_schedule_base_ms: Annotated[float, Meta(ge=0, le=2**30)] = 28.0
    mtp_schedule_lambda: Annotated[float, Meta(ge=0, le=2**30)] = 0.0
    mtp_schedule_min_depth: Depth = 1
    mtp_schedule_adapt: bool = True
    mtp_schedule_sampled_scale: Annotated[float, Meta(gt=0, le=1)] = 0.93
    mtp_draft: Literal["auto", "sampled", "greedy"] = "auto"
    mtp_draft_temperature: Annotated[float, Meta(gt=0, le=4)] = 1.0
    mtp_verify: Literal["token", "block"] = "token"
    mtp_expert_format: Literal["fp8", "bf16_fused", "bf16"] = "fp8"
    graph_batch_min_live: Annotated[int, Meta(ge=0, le=2**20)] = 0
    compact_batches: bool = False
    sampling_candidates: Annotated[int, Meta(ge=1, le=256)] = 128
    prefill: Literal["bounded", "exact"] = "bounded"
    ngram_table: Literal["resident", "mmap"] = "resident"
    dense_weights: Literal["checkpoint", "fp8"] = "checkpoint"
    fp8_head: Literal["gemv", "mma"] = "gemv"
    bf16_weights: Literal["checkpoint", "bf12", "bf12+bf16"] = "checkpoint"
    rope_scaling: RopeScaling | UnsetType = UNSET
    bulk_pace_gbps: float = -1.0
    bulk_inflight: Annotated[int, Meta(ge=-1, le=2**20)] = -1
    rendezvous_timeout_ms: Positive = 120_000

    def __post_init__(self) -> None:
        if self.mtp_depth > 1 and not self.mtp:
            raise ValueError("mtp_depth: above 1 needs `mtp`")
        if self.mtp_schedule and not self.mtp:
            raise ValueError("mtp_schedule: needs `mtp`")
        if self.mtp_schedule_min_depth > self.mtp_depth:
            raise ValueError("mtp_schedule_min_depth: must not be above `mtp_depth`")
        if self.graph_batch_min_live > self.max_concurrency:
            raise ValueError("graph_batch_min_live: must not be above `max_concurrency`")
        if self.prefill_idle_budget_tokens and self.prefill_idle_budget_tokens < self.busy_budget:
            raise ValueError("prefill_idle_budget_tokens: must not be below `prefill_budget_tokens`")
        if self.prefill_idle_budget_tokens and not self.busy_budget:
            raise ValueError("prefill_idle_budget_tokens: needs a `prefill_budget_tokens` other than 0")

    @property
    def scaling(self) -> dict[str, Any] | None:
        """``rope_scaling`` as a model's `ModelSpec.rescale` is given it."""
        given = self.rope_scaling
        if given is UNSET:
            return None
        keys: dict[str, Any] = msgspec.to_builtins(given)
        return keys

    @property
    def busy_budget(self) -> int:
        """Prompt tokens a tick while replies run; 0 is the whole prompt."""
        return AUTOMATIC_PREFILL_TOKENS if self.prefill_budget_tokens == -1 else self.prefill_budget_tokens

    @property
    def idle_budget(self) -> int:
        """Prompt tokens a tick while no reply runs; 0 is the whole prompt."""
        return self.prefill_idle_budget_tokens or self.busy_budget

    def on_device(self, *, gpu: bool) -> EngineSettings:
        """With what is automatic decided for the kind of device."""
        if not gpu or self.prefill_budget_tokens != -1:
            return self
        idle = self.prefill_idle_budget_tokens or GPU_IDLE_PREFILL_TOKENS
        busy = min(GPU_PREFILL_TOKENS, idle)
        return msgspec.structs.replace(self, prefill_budget_tokens=busy, prefill_idle_budget_tokens=idle)

    @property
    def pool_blocks(self) -> int:
        """KV blocks that requests can use."""
        return -(-self.kv_capacity // self.block_tokens)


_MATCHED = "where drafts are the likeliest tokens and stand if they are what the sampler picks"
IDLE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "mtp_draft": _MATCHED,
        "mtp_draft_temperature": _MATCHED,
        "mtp_verify": _MATCHED,
        "mtp_expert_format": "where a checkpoint's tensors say how they are stored",
        "graph_batch_min_live": "where every number of requests has a graph",
        "compact_batches": "where a step always takes the smallest graph that holds it",
        "sampling_candidates": "in this version",
        "fp8_head": "in this version",
        "bulk_inflight": "in this version",
    }
)
"""Keys that are read and checked, and that nothing acts on, each with where; a deployment may come with them."""


SCHEDULE_KEYS = (
    "mtp_schedule_row_ms", "mtp_schedule_base_ms", "mtp_schedule_lambda", "mtp_schedule_min_depth",
    "mtp_schedule_adapt", "mtp_schedule_sampled_scale",
)  # fmt: skip
"""Keys that are acted on with ``mtp_schedule`` alone."""

CONFIDENCE_KEYS = ("mtp_schedule_lambda", "mtp_schedule_adapt", "mtp_schedule_sampled_scale")
"""Those of them that are acted on where the drafter says how sure it is."""


def without_effect(settings: EngineSettings) -> dict[str, str]:
    """The keys that were given a value of their own although nothing acts on them, each with where; warn of each.

    What turns on the model, `dgpp_core.scheduler.sizing.idle_schedule` knows.
    """
    found = {key: IDLE_KEYS[key] for key in given(settings, IDLE_KEYS)}
    if not settings.mtp_schedule:
        found |= dict.fromkeys(given(settings, SCHEDULE_KEYS), "without `mtp_schedule`")
    return found


def given(settings: EngineSettings, keys: Iterable[str]) -> list[str]:
    """Those of the keys that have another value than their default."""
    plain = EngineSettings()
    return [key for key in keys if getattr(settings, key) != getattr(plain, key)]


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP service: ``bind_host`` (an IP address) and ``port`` to listen at, ``max_body_bytes`` of a request,
    ``sse_ping_interval``, the seconds of silence after which a stream gets a comment (-1 is off), and
    ``api_key_file``, the hashed API keys of which requests must show one (empty: none is needed)."""

    bind_host: str = "127.0.0.1"
    port: Port = 18080
    max_body_bytes: Bytes = 268_435_456
    sse_ping_interval: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 30
    api_key_file: str = ""

    def __post_init__(self) -> None:
        try:
            ip_address(self.bind_host)
        except ValueError as error:
            raise ValueError(f"bind_host: must be {error}") from None
        if self.sse_ping_interval == 0:
            raise ValueError("sse_ping_interval: must be -1 (off) or at least 1")


class Paths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The only paths a deployment may set; everything else belongs to the site."""

    resident_cache: str = ""


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model at one world size.

    Attributes:
        model: the exact Hugging Face id.
        world_size: ranks; the first ``world_size`` nodes of the site.
        release: installed software version; empty for a development build.
        http: what the site's HTTP settings are overridden with, as parsed and checked (see `HttpSettings`).
    """

    model: Annotated[str, Meta(min_length=1)]
    world_size: Annotated[int, Meta(ge=1)]
    release: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.+-]*)?$")] = ""
    engine: EngineSettings = EngineSettings()
    paths: Paths = Paths()
    http: dict[str, Any] = {}


SITE_KEYS = ("nodes", "ssh_user", "node_env")


def read_deployment(path: Path) -> Deployment:
    """The deployment in ``path``.

    Raises:
        ConfigError: unreadable, not JSON, or a key that is unknown, missing, twice, of a wrong type or out of range.
    """
    raw = parse_json(read_text(path, "deployment file"), str(path))
    return parse_deployment(raw, str(path))


def parse_deployment(raw: object, where: str) -> Deployment:
    """A deployment from parsed JSON; ``where`` names its source in errors."""
    if isinstance(raw, dict):
        for key in SITE_KEYS:
            if key in raw:
                raise ConfigError(
                    f"`{key}` does not belong in a deployment",
                    where=where,
                    hint="set DGPP_NODES and DGPP_SSH_USER in the site file (.env), which names the machines",
                )
        if isinstance(http := raw.get("http"), dict):
            convert({"http": http}, _HttpOnly, where)
    return convert(raw, Deployment, where)


class _HttpOnly(msgspec.Struct):
    http: HttpSettings
