"""Messages between the front end and the engine: msgpack, tagged, one frame each. Torch-free.

A frame is a little-endian uint32 length and that many bytes. `VERSION` is compared at the start: both ends come from
one installation, so a difference means a broken one.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from dgpp_core.config.fabric import Fabric
from dgpp_core.engine.operations import TokenLogprobs
from dgpp_core.images.picture import Picture
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.text.grammar.spec import Grammar

VERSION = 1

Reason = Literal["eos", "length", "stop", "cancelled", "error"]

MissReason = Literal[
    "below a block", "below the minimum", "never seen", "evicted", "no snapshot", "snapshot evicted"
]  # fmt: skip
"""Why a prompt found nothing in the prefix cache. ``below the minimum``: shorter than any snapshot that is taken;
``no snapshot``: its rows are there, but not the window or recurrent state behind them."""
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The world that rank 0 leads.

    Attributes:
        here: ranks on this host.
        epoch: counts the starts of the world; ranks of another one are refused.
        journal_fd: the listening socket that the others connect to, open in the engine process.
        fabric_port: where the bus meets; 0 takes any that is free.
        log_dir: where fault files go.
        timeout: seconds for the others to join.
        fabric: how this host reaches them.
    """

    world: int
    here: int
    epoch: int
    journal_fd: int
    fabric_port: int
    log_dir: str
    timeout: float
    fabric: Fabric = Fabric()


class Boot(msgspec.Struct, frozen=True, kw_only=True, tag="boot"):
    """Front end to engine, first: what to serve.

    Attributes:
        settings: the JSON of the resolved engine settings.
        image_cache: the folder of resident images; empty for none.
        ranks: the other ranks, where there are any.
    """

    version: int
    model: str
    checkpoint: str
    device: str
    settings: bytes
    image_cache: str = ""
    ranks: Ranks | None = None


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A validated request.

    Attributes:
        id: unique in this process.
        tokens: the prompt, at least one id.
        max_tokens: most tokens to generate, at least 1.
        logprobs: alternatives a token, -1 for none at all.
        eos_ids: ids that end the reply; empty with ``ignore_eos``.
        use_cache: whether prefixes may be reused and left behind.
        turns: positions at which one of the prompt's messages is over, ascending.
        grammar: what the reply is held to.
        pictures: images among the tokens, in the order of their places.
    """

    id: int
    tokens: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    logprobs: int = -1
    eos_ids: tuple[int, ...] = ()
    use_cache: bool = True
    turns: tuple[int, ...] = ()
    grammar: Grammar | None = None
    pictures: tuple[Picture, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client left."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """A stop string matched: end the request with reason ``stop``."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End what runs, then leave. Requests still running are cancelled."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine serves.

    Attributes:
        context_tokens: most tokens (prompt and reply) a request may have.
        position_ceiling: the model's own bound.
        pool_tokens: tokens the KV pool holds.
        constrained: whether replies can be held to grammars.
        row_exact: whether the rehearsal found every row's bits independent of its neighbours.
        plan: the printed memory plan.
    """

    version: int
    pid: int
    vocab_size: int
    context_tokens: int
    position_ceiling: int
    pool_tokens: int
    row_exact: bool
    constrained: bool = False
    load_seconds: float
    plan: str


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress before `Ready`: a stage name and, where known, bytes done and in all."""

    stage: str
    done: int = 0
    total: int = 0


class Update(msgspec.Struct, frozen=True, array_like=True):
    """Tokens one step committed for a request."""

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """A request ended, exactly once. The token that ended it by ``eos`` was in an `Update` and counts.

    ``cached_tokens`` of the prompt were reused, of ``known_tokens`` whose rows were there; ``miss`` says why none were.
    """

    id: int
    reason: Reason
    cached_tokens: int = 0
    error: str = ""
    known_tokens: int = 0
    miss: str = ""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """What one tick has for the clients."""

    updates: tuple[Update, ...]
    endings: tuple[Ending, ...] = ()


class PrefillProgress(msgspec.Struct, frozen=True):
    """How far a prompt is."""

    id: int
    slot: int
    prompt_tokens: int
    processed_tokens: int
    cached_tokens: int


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges of now.

    ``cache_misses_by`` counts misses in the order of `MISS_REASONS`; prompts that were not to be looked up are
    ``cache_unasked``.

    ``drafted_at`` and ``accepted_at`` count drafts and those that stood by their place in a step, first to last.

    ``kernels_compiled`` counts kernels that first appeared after `Ready`: each is a stall, and a shape that the boot
    should have met.
    """

    ticks: int = 0
    active: int = 0
    prefilling: int = 0
    queued: int = 0
    slots: int = 0
    blocks_total: int = 0
    blocks_in_use: int = 0
    blocks_cached: int = 0
    snapshots_total: int = 0
    snapshots_in_use: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_preempted: int = 0
    tokens_generated: int = 0
    prompts_prefilled: int = 0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    step_ms: float = 0.0
    prefill_ms: float = 0.0
    kernels_compiled: int = 0
    draft_rounds: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    cache_hits: int = 0
    cache_misses: int = 0
    cache_misses_by: tuple[int, ...] = ()
    cache_unasked: int = 0
    cache_tokens_saved: int = 0
    cache_evictions: int = 0
    prefills: tuple[PrefillProgress, ...] = ()


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent by a thread of its own every 0.2 s: the process runs; ``progress`` grows with every finished step."""

    progress: int
    busy: bool
    stats: Stats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot go on; it exits after this."""

    what: str
    detail: str
    exit_code: int


ToEngine = Boot | Submit | Cancel | Stop | Shutdown
FromEngine = Ready | Loading | Output | Beat | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as one frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def decode_to_engine(body: bytes) -> ToEngine:
    """A frame's body, as the engine reads it; raises `msgspec.DecodeError`."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """A frame's body, as the front end reads it; raises `msgspec.DecodeError`."""
    return _from_engine.decode(body)
