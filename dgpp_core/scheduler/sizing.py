"""A scheduler's limits from an engine's geometry and the settings."""

from __future__ import annotations

from dgpp_core.config.settings import CONFIDENCE_KEYS, SCHEDULE_KEYS, EngineSettings, given
from dgpp_core.engine import families
from dgpp_core.engine.geometry import Geometry
from dgpp_core.scheduler.limits import Limits


def limits_from(
    geometry: Geometry,
    settings: EngineSettings,
    needs_snapshot: bool,
    *,
    decode_rows_match_prefill: bool = True,
    confident: bool = False,
) -> Limits:
    """The limits that fit the pools an engine has allocated.

    Args:
        needs_snapshot: the model has window or recurrent state.
        decode_rows_match_prefill, confident: see `Limits`.
    """
    depth = geometry.step_width - 1
    return Limits(
        slots=geometry.slots,
        blocks=geometry.blocks,
        block_tokens=geometry.block_tokens,
        snapshots=geometry.snapshots,
        needs_snapshot=needs_snapshot,
        snapshot_least=settings.prefix_min_tokens,
        snapshot_heads=settings.prefix_head_snapshots,
        decode_rows_match_prefill=decode_rows_match_prefill,
        queue=settings.queue_limit,
        admission=settings.admission,
        admission_window=settings.admission_window,
        prefill_budget=settings.busy_budget,
        prefill_idle_budget=settings.prefill_idle_budget_tokens,
        depth=depth,
        ladder=step_depths(geometry, settings) if settings.mtp_schedule and depth else (),
        base_ms=settings.mtp_schedule_base_ms,
        row_ms=settings.mtp_schedule_row_ms,
        confident=confident,
        worth=settings.mtp_schedule_lambda,
        adapt=settings.mtp_schedule_adapt,
        sampled_scale=settings.mtp_schedule_sampled_scale,
        max_context=geometry.context,
        prefix_cache=settings.prefix_cache_gib > 0,
        prefill_tail=geometry.prefill_tail,
    )


def idle_schedule(settings: EngineSettings, limits: Limits) -> dict[str, str]:
    """The keys of ``mtp_schedule`` that were given a value although this engine does not act on them, each with why.

    Args:
        limits: of the engine.
    """
    if not settings.mtp_schedule:  # `without_effect` names the others
        return {}
    if len(limits.ladder) < 2:
        times = [key for key in given(settings, SCHEDULE_KEYS) if key != "mtp_schedule_min_depth"]
        return dict.fromkeys(["mtp_schedule", *times], f"every step drafts {limits.depth}: there is nothing to choose")
    if not limits.confident:
        sure = given(settings, CONFIDENCE_KEYS)
        return dict.fromkeys(sure, "the model's drafter does not say how sure it is")
    if limits.worth and not limits.adapt:
        return dict.fromkeys(given(settings, ("mtp_schedule_base_ms",)), "what a ms is worth is given and stays")
    return {}


def step_depths(geometry: Geometry, settings: EngineSettings) -> tuple[int, ...]:
    """Draft depths that an engine's steps may have."""
    return families.step_depths(geometry.step_width - 1, settings)
