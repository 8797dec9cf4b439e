"""The memory plan: what an engine will take, by arithmetic, before anything is allocated. Torch-free.

Lines marked exact are tensors that the engine allocates, byte for byte. The others (the runtime, scratch) are bounds
from the formulas beside them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import msgspec

from dgpp_core.api import BindingTable, ModelConfig, PagedGroup, PlanError, PlanTerm, StateGroup, for_device
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.geometry import make_geometry
from dgpp_core.engine.plan_terms import (
    ALLOCATOR_PERMILLE,
    IN_FILES,
    MIB,
    RUNTIME_BYTES,
    PlanLine,
    Widths,
    loading_bytes,
    row_bytes,
    scratch_lines,
    state_lines,
    table_lines,
    weight_lines,
)
from dgpp_core.formats.resident import DeviceKind


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine will take and what there is, in bytes.

    Attributes:
        lines: the items, in the order of the table.
        available: memory that can be had.
        headroom: what must stay free of it.
        token_bytes: pool bytes a context token.
        kv_capacity: of the plan, in tokens.
        largest_kv_capacity: the most tokens that fit, in whole blocks; 0 where no block does, None where the plan fits.
    """

    lines: tuple[PlanLine, ...]
    available: int
    headroom: int
    token_bytes: int
    kv_capacity: int
    largest_kv_capacity: int | None

    @property
    def total(self) -> int:
        """Sum of the lines."""
        return sum(line.bytes for line in self.lines)

    @property
    def tensor_bytes(self) -> int:
        """Sum of the exact lines: the weights and state that the engine allocates."""
        return sum(line.bytes for line in self.lines if line.exact)

    @property
    def fits(self) -> bool:
        """Whether the total leaves the headroom free."""
        return self.total + self.headroom <= self.available

    def table(self) -> str:
        """The plan as text, a line an item, with a verdict."""
        foot = (("need", self.total), ("headroom", self.headroom), ("available", self.available))
        names = [line.name for line in self.lines]
        left = max(map(len, [*names, *(name for name, _ in foot)]))
        rows = [f"{line.name:<{left}}  {_size(line.bytes):>11}  {line.note}".rstrip() for line in self.lines]
        rows.append("-" * (left + 13))
        rows += [f"{name:<{left}}  {_size(value):>11}" for name, value in foot]
        rows.append("the plan fits" if self.fits else "the plan does not fit")
        return "\n".join(rows)

    def to_json(self) -> dict[str, Any]:
        """The fields and the totals as JSON values."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields | {"total": self.total, "fits": self.fits}

    def require(self) -> None:
        """Raise `PlanError` unless the plan fits."""
        if self.fits:
            return
        largest = sorted(self.lines, key=lambda line: -line.bytes)[:3]
        movable = f"set {IN_FILES}, " if any(IN_FILES in line.note for line in self.lines) else ""
        lower = ["max_concurrency"]
        if any("snapshot" in line.name or "snapshot" in line.note for line in self.lines):
            lower.append("prefix_cache_gib")
        kept = sum(line.bytes for line in self.lines if line.name.startswith("weights") and IN_FILES not in line.note)
        if kept > self.available:
            advice = "not one block of kv_capacity fits, and no setting makes room for the weights: "
            advice += "divide the model among more ranks, or use a larger machine"
        elif self.largest_kv_capacity:
            fitting = f"the largest kv_capacity that fits is {self.largest_kv_capacity} (now {self.kv_capacity})"
            advice = f"{fitting}; {movable}lower {_listed(['it', *lower])}"
        else:
            advice = f"not one block of kv_capacity fits; {movable}free memory, choose a smaller model or lower "
            advice += _listed(lower)
        raise PlanError(
            "the memory plan does not fit",
            where="largest items: " + ", ".join(f"{line.name} {_size(line.bytes)}" for line in largest),
            found=f"need {_size(self.total)} + headroom {_size(self.headroom)}, available {_size(self.available)}",
            expected=f"need + headroom <= available; a context token takes {self.token_bytes / 1024:.2f} KiB",
            hint=advice,
        )


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def make_plan(
    *,
    table: BindingTable,
    groups: Sequence[StateGroup],
    config: ModelConfig,
    settings: EngineSettings,
    world: int,
    device_kind: DeviceKind,
    step_width: int,
    extra: Sequence[PlanTerm],
    available: int,
) -> Plan:
    """The plan of one rank.

    Args:
        groups: of the model and its drafter, as one rank of ``world`` keeps them.
        step_width: rows a verify step runs a request, as `make_geometry` derives it: 1 + draft depth.
        extra: the family's own terms; counted as exact where they say so.
        available: bytes there are, from a `MemoryReader`.

    Raises:
        CheckpointError: ``world`` ranks cannot divide a tensor.
        ConfigError: the model cannot divide its embedding as the settings want.
    """
    groups = for_device(groups, device_kind)
    table = table.for_serving(
        drafting=step_width > 1,
        divided=settings.embed_sharding == "vocab",
        in_files=settings.ngram_table == "mmap",
        rounded=settings.dense_weights == "fp8",
    )
    fixed = [
        PlanLine("runtime", RUNTIME_BYTES[device_kind], "process and libraries"),
        *weight_lines(table, world, device_kind, settings.bf16_weights),
        *(PlanLine(term.name, term.bytes, term.note, exact=term.exact) for term in extra),
    ]
    loading = loading_bytes(table, world, device_kind, settings.bf16_weights)
    widths = Widths.of(table, groups, config, world)

    def lines(capacity: int) -> list[PlanLine]:
        sized = msgspec.structs.replace(settings, kv_capacity=capacity)
        geometry = make_geometry(config, groups, sized, step_width - 1)
        later = [
            *table_lines(table, settings, geometry, world, device_kind),
            *state_lines(groups, geometry),
            *scratch_lines(groups, config.vocab_size, sized, geometry, widths, device_kind),
        ]
        if (more := loading - sum(line.bytes for line in later)) > 0:
            later.append(PlanLine("loading", more, "packing a matrix takes more than serving does later"))
        if device_kind == "cuda":
            held = sum(line.bytes for line in (*fixed, *later) if line.exact)
            later.append(PlanLine("allocator", held * ALLOCATOR_PERMILLE // 1000, "pages that tensors fill in part"))
        return [*fixed, *later]

    headroom = headroom_bytes(device_kind, available)

    def exceeds(capacity: int) -> bool:
        return sum(line.bytes for line in lines(capacity)) + headroom > available

    largest = None
    if exceeds(settings.kv_capacity):  # every term grows with the pool, so the block counts that fit come first
        tokens = range(settings.block_tokens, settings.kv_capacity + settings.block_tokens, settings.block_tokens)
        largest = bisect.bisect_left(tokens, True, key=exceeds) * settings.block_tokens
    return Plan(
        lines=tuple(lines(settings.kv_capacity)),
        available=available,
        headroom=headroom,
        token_bytes=sum(row_bytes(group) for group in groups if isinstance(group, PagedGroup)),
        kv_capacity=settings.kv_capacity,
        largest_kv_capacity=largest,
    )


def headroom_bytes(device: DeviceKind, available: int) -> int:
    """What must stay free: 4 GiB beside a GPU (a Spark's GPU and host share memory), else 2 %, at least 256 MiB."""
    return 4096 * MIB if device == "cuda" else max(256 * MIB, available // 50)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.1f} MiB"
