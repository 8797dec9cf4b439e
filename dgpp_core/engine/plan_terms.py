"""The terms of the memory plan: weights, state groups, scratch. Pure arithmetic, torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from dgpp_core.api import DTYPE_BYTES, BindingTable, ModelConfig, PagedGroup, StateGroup, WindowGroup
from dgpp_core.api.bindings import Binding, Role
from dgpp_core.checkpoint.cuts import cut_shape
from dgpp_core.config.settings import EngineSettings
from dgpp_core.formats.resident import COMPUTE_BYTES, DeviceKind, resident_bytes

MAX_SNAPSHOTS = 4096
MIB = 2**20

RUNTIME_BYTES: dict[DeviceKind, int] = {"cpu": 256 * MIB, "cuda": 768 * MIB}
"""Resident set of the process before it holds a tensor. cpu: 225 MiB after importing torch 2.13.0+cpu, 245 MiB after
the engine's modules and its first products of every kind (x86-64, Python 3.11, 2026-11-29). cuda: a bound on a context
with its libraries' workspaces."""

ATTENTION_ROWS = 256
"""Prefill rows that share one attention product: `dgpp_core.layers.paged.CHUNK_ROWS`."""
_ROW_TILE = 8
_KEY_TILE = 64


class PlanLine(msgspec.Struct, frozen=True):
    """One item, in bytes a rank; ``exact`` where it is a tensor that is allocated as counted."""

    name: str
    bytes: int
    note: str = ""
    exact: bool = False


class Parameter(msgspec.Struct, frozen=True):
    """One target of the binding table on one rank: ``shape`` is cut and concatenated."""

    role: Role
    shape: tuple[int, ...]

    def bytes(self, device: DeviceKind) -> int:
        """Resident bytes."""
        return resident_bytes(self.role, self.shape, device)


def parameters(table: BindingTable, world: int) -> dict[str, Parameter]:
    """Every target as one rank of ``world`` holds it, by name; raises `CheckpointError` where a cut does not divide."""
    parts: dict[str, list[Binding]] = {}
    for binding in table.tensors:
        parts.setdefault(binding.target, []).append(binding)
    found = {}
    for target, bindings in parts.items():
        shapes = [cut_shape(binding, world) for binding in bindings]
        shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        found[target] = Parameter(bindings[0].role, shape)
    return found


def weight_lines(table: BindingTable, world: int, device: DeviceKind) -> Iterator[PlanLine]:
    """Resident bytes a role, the second resident forms of ``table.shared``, and what loading needs on the way."""
    held = parameters(table, world)
    roles: tuple[Role, ...] = ("linear", "embedding", "vector")
    for role in roles:
        chosen = [parameter for parameter in held.values() if parameter.role == role]
        if chosen:
            count = sum(math.prod(parameter.shape) for parameter in chosen)
            total = sum(parameter.bytes(device) for parameter in chosen)
            yield PlanLine(f"weights: {role}", total, f"{count / 1e6:.1f} M parameters", exact=True)
    if device == "cpu":
        for source, target in table.shared:
            copy = resident_bytes("linear", held[source].shape, device)
            yield PlanLine(f"weights: {target}", copy, f"{source} in packed form", exact=True)
        staging = max((4 * math.prod(p.shape) for p in held.values() if p.role == "linear"), default=0)
        yield PlanLine("loader staging", staging, "largest matrix before it is packed")


def row_bytes(group: PagedGroup | WindowGroup) -> int:
    """Bytes of one token's rows in all layers."""
    return group.layers * group.heads * group.width * DTYPE_BYTES[group.dtype]


def snapshot_bytes(groups: Sequence[StateGroup], step_width: int) -> int:
    """Bytes of one snapshot: a slot's window and recurrent state."""
    total = 0
    for group in groups:
        if isinstance(group, WindowGroup):
            total += row_bytes(group) * (group.window + step_width)
        elif not isinstance(group, PagedGroup):
            total += group.layers * math.prod(group.shape) * DTYPE_BYTES[group.dtype]
    return total


def snapshot_count(groups: Sequence[StateGroup], settings: EngineSettings, step_width: int) -> int:
    """Arena slots that ``prefix_cache_gib`` buys, at most `MAX_SNAPSHOTS`; 0 for a model without such state."""
    each = snapshot_bytes(groups, step_width)
    return min(MAX_SNAPSHOTS, int(settings.prefix_cache_gib * 2**30 / each)) if each else 0


def slot_lines(groups: Sequence[StateGroup], settings: EngineSettings, step_width: int) -> Iterator[PlanLine]:
    """State that grows with slots and snapshots, not with the pool."""
    slots = settings.max_concurrency
    for group in groups:
        if isinstance(group, WindowGroup):
            ring = row_bytes(group) * (group.window + step_width)
            yield PlanLine(f"state: {group.name}", slots * ring, f"{slots} rings", exact=True)
        elif not isinstance(group, PagedGroup):
            block = group.layers * math.prod(group.shape) * DTYPE_BYTES[group.dtype]
            note = f"{slots} slots x {step_width} candidates"
            yield PlanLine(f"state: {group.name}", slots * step_width * block, note, exact=True)
    if count := snapshot_count(groups, settings, step_width):
        yield PlanLine("prefix snapshots", count * snapshot_bytes(groups, step_width), f"{count} snapshots", exact=True)


def pool_lines(groups: Sequence[StateGroup], settings: EngineSettings) -> Iterator[PlanLine]:
    """Paged groups: every block of the pool, and block 0, which takes the rows of inert segments."""
    for group in groups:
        if isinstance(group, PagedGroup):
            blocks = settings.pool_blocks + 1
            total = blocks * settings.block_tokens * row_bytes(group)
            yield PlanLine(f"KV pool: {group.name}", total, f"{blocks} blocks of {settings.block_tokens}", exact=True)


class Widths(msgspec.Struct, frozen=True):
    """Widths that bound a forward's scratch, a rank's share.

    Attributes:
        hidden: of the residual stream.
        linear: the most output rows of a matrix that runs over prefill rows (the output head does not).
        query: of a row's queries, all heads together. The plan is not told it and takes the hidden size or the widest
            key/value row, whichever is more.
    """

    hidden: int
    linear: int
    query: int

    @classmethod
    def of(cls, table: BindingTable, groups: Sequence[StateGroup], config: ModelConfig, world: int) -> Widths:
        """The widths of a model."""
        vocab = {config.vocab_size, -(-config.vocab_size // world)}
        rows = [p.shape[-2] for p in parameters(table, world).values() if p.role == "linear" and len(p.shape) >= 2]
        kept = [group.heads * group.width for group in groups if isinstance(group, PagedGroup | WindowGroup)]
        linear = max((count for count in rows if count not in vocab), default=config.hidden_size)
        return cls(config.hidden_size, linear, max([-(-config.hidden_size // world), *kept]))


def scratch_lines(
    groups: Sequence[StateGroup],
    config: ModelConfig,
    settings: EngineSettings,
    step_width: int,
    widths: Widths,
    device: DeviceKind,
) -> Iterator[PlanLine]:
    """Bounds on what the largest admitted step needs beyond weights and state.

    * logits: two copies (raw and processed) of max(8, slots x step width) rows of float32.
    * sampler: token counts and masks, 8 bytes a slot and vocabulary entry.
    * activations: rows x (4 x hidden + 2 x the widest matrix) elements, rows the larger of a prefill chunk and a
      decode step.
    * attention: see `attention_bytes`.
    """
    decode_rows = max(_ROW_TILE, settings.max_concurrency * step_width)
    chunk = chunk_rows(settings)
    rows = max(chunk, decode_rows)
    activations = rows * (4 * widths.hidden + 2 * widths.linear) * COMPUTE_BYTES[device]
    yield PlanLine("logits", 2 * decode_rows * config.vocab_size * 4, f"2 x {decode_rows} rows")
    yield PlanLine("sampler", settings.max_concurrency * config.vocab_size * 8, f"{settings.max_concurrency} slots")
    yield PlanLine("activations", activations, f"{rows} rows")
    context = min(settings.pool_blocks * settings.block_tokens, config.max_positions)
    attention = attention_bytes(groups, settings, step_width, widths, context)
    yield PlanLine("attention scratch", attention, f"{min(chunk, ATTENTION_ROWS)} rows over {context} tokens")


def chunk_rows(settings: EngineSettings) -> int:
    """Prompt tokens of the largest prefill chunk."""
    whole = settings.pool_blocks * settings.block_tokens
    return min(whole, max(settings.busy_budget or whole, settings.idle_budget or whole))


def attention_bytes(
    groups: Sequence[StateGroup], settings: EngineSettings, step_width: int, widths: Widths, context: int
) -> int:
    """The most that one layer's attention (`dgpp_core.ops.tile_attention`) holds at once, in float32.

    For one group, with S = scores = keys x padded rows x query heads: three copies of S (raw, shifted, exponent), the
    queries and the values spread over key tiles (S x width / tile each), and the gathered keys and values. Taken at
    the larger of one prefill product over the whole context and a decode step of every slot over it.
    """
    worst = 0
    for group in groups:
        if not isinstance(group, PagedGroup | WindowGroup):
            continue
        tile = settings.block_tokens if isinstance(group, PagedGroup) else _KEY_TILE
        heads = max(group.heads, -(-widths.query // group.width))
        share = -(-heads // group.heads)
        rows = min(chunk_rows(settings), ATTENTION_ROWS) if isinstance(group, PagedGroup) else chunk_rows(settings)
        for segments, count in ((1, rows), (settings.max_concurrency, step_width)):
            reach = context if isinstance(group, PagedGroup) else group.window + count + 2 * _KEY_TILE
            keys = segments * -(-min(reach, context + 2 * _KEY_TILE) // tile) * tile
            padded = -(-count * share // _ROW_TILE) * _ROW_TILE
            scores = keys * padded * group.heads
            spread = 2 * scores * group.width // tile
            gathered = 2 * keys * group.heads * group.width
            worst = max(worst, 4 * (3 * scores + spread + gathered))
    return worst
