"""Sizes of the state pools: one arithmetic for the memory plan and the allocation. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dgpp_core.api import DTYPE_BYTES, ConfigError, ModelConfig, PagedGroup, RecurrentGroup, StateGroup, WindowGroup
from dgpp_core.config.settings import EngineSettings

MAX_SNAPSHOTS = 4096
GPU_STEP_ROWS = 256
"""Most rows, requests times (1 + drafts), of a decode step on a GPU: what the attention kernels take in one launch."""
LEAST_CONTEXT = 16
"""Tokens that any served request may have; less is a mistake in a setting."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What the pools of one rank are allocated for.

    Attributes:
        slots: requests that may hold state at once; window and recurrent pools have one slot more, for inert segments.
        blocks: blocks that may be handed out; block 0 comes on top and takes the rows of inert segments.
        block_tokens: tokens a block.
        snapshots: arena slots.
        step_width: rows a verify step runs a request.
        context: most tokens, prompt and reply together, that a request may have.
        prefill_tail: rows at a prompt's end that alone go through every layer; 0 where all do.
    """

    slots: int
    blocks: int
    block_tokens: int
    snapshots: int
    step_width: int
    context: int
    prefill_tail: int = 0

    @property
    def slack(self) -> int:
        """Rows past a request's end that steps in flight may still write."""
        return 3 * self.step_width

    @property
    def table_width(self) -> int:
        """Blocks of the longest request."""
        return -(-(self.context + self.slack) // self.block_tokens)


def pool_shape(group: StateGroup, geometry: Geometry) -> tuple[int, ...]:
    """Shape of a group's pool."""
    if isinstance(group, PagedGroup):
        return (group.layers, rank_blocks(group, geometry), group.heads, geometry.block_tokens, group.width)
    if isinstance(group, WindowGroup):
        return (group.layers, geometry.slots + 1, group.heads, group.window + geometry.step_width, group.width)
    return (group.layers, geometry.slots + 1, geometry.step_width, *group.shape)


def rank_blocks(group: PagedGroup, geometry: Geometry) -> int:
    """Blocks of a rank's pool; where ranks divide them, with one for rows that another one holds."""
    blocks = geometry.blocks + 1
    return blocks if group.ranks == 1 else -(-blocks // group.ranks) + 1


def snapshot_shape(group: StateGroup, step_width: int) -> tuple[int, ...] | None:
    """Shape of one snapshot of a group, without its leading arena axis after the layers; None for paged groups."""
    if isinstance(group, WindowGroup):
        return (group.layers, group.heads, group.window + step_width, group.width)
    if isinstance(group, RecurrentGroup):
        return (group.layers, *group.shape)
    return None


def snapshot_bytes(groups: Sequence[StateGroup], step_width: int) -> int:
    """Bytes of one snapshot of all window and recurrent state; 0 where a model has none."""
    shapes = [(snapshot_shape(group, step_width), DTYPE_BYTES[group.dtype]) for group in groups]
    return sum(math.prod(shape) * width for shape, width in shapes if shape is not None)


def make_geometry(
    config: ModelConfig, groups: Sequence[StateGroup], settings: EngineSettings, draft_depth: int
) -> Geometry:
    """The geometry of an engine.

    Args:
        draft_depth: most tokens the model's drafter proposes a step; 0 without one.
    """
    step_width = 1 + (min(draft_depth, settings.mtp_depth) if settings.mtp else 0)
    each = snapshot_bytes(groups, step_width)
    snapshots = min(MAX_SNAPSHOTS, int(settings.prefix_cache_gib * 2**30 // each)) if each else 0
    room = settings.pool_blocks * settings.block_tokens - 3 * step_width
    return Geometry(
        slots=settings.max_concurrency,
        blocks=settings.pool_blocks,
        block_tokens=settings.block_tokens,
        snapshots=snapshots,
        step_width=step_width,
        context=max(1, min(config.max_positions, room)),
        prefill_tail=config.prefill_tail if settings.prefill == "bounded" else 0,
    )


def require_room(geometry: Geometry, config: ModelConfig, gpu: bool = False) -> None:
    """Raise `ConfigError` where no sensible request fits the pool or the positional ceiling, or no full step a GPU."""
    pool, least = geometry.blocks * geometry.block_tokens, LEAST_CONTEXT + 8 * geometry.step_width
    if pool < least:
        raise ConfigError("no request fits the KV pool", where="kv_capacity", found=str(pool), expected=f">= {least}")
    if (found := config.max_positions) < LEAST_CONTEXT:
        where, expected = "max_position_embeddings", f">= {LEAST_CONTEXT}"
        raise ConfigError("the model has too few positions", where=where, found=str(found), expected=expected)
    if gpu and geometry.slots * geometry.step_width > GPU_STEP_ROWS:
        raise ConfigError(
            "a decode step would have too many rows for a GPU",
            where="max_concurrency, mtp_depth",
            found=f"{geometry.slots} requests of {geometry.step_width} rows",
            expected=f"<= {GPU_STEP_ROWS} rows in all",
            hint=f"set max_concurrency to {GPU_STEP_ROWS // geometry.step_width} or less",
        )
