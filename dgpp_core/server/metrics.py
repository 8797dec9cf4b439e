"""Counters as JSON: what the engine's last beat said, what the front end counts, and how far prompts are."""

from __future__ import annotations

from typing import Any

from dgpp_core.config.settings import EngineSettings
from dgpp_core.scheduler.messages import MISS_REASONS, Stats
from dgpp_core.server.prometheus import OPENMETRICS_TYPE, PROMETHEUS_TYPE, prometheus_text
from dgpp_core.server.service import Service

__all__ = ["OPENMETRICS_TYPE", "PROMETHEUS_TYPE", "json_metrics", "prometheus_text"]


def json_metrics(service: Service) -> dict[str, Any]:
    """Counters since the start and gauges of now. The shape is the same whatever is switched off.

    The engine's part is ``scheduler.snapshot_age_ms`` old, 0.2 s at most while it runs.
    """
    stats = service.client.stats
    settings = service.served.settings
    return {
        "scheduler": _scheduler(service, stats, settings),
        "service": _service(service, stats, settings),
        "prefix_cache": _prefix_cache(service, stats, settings),
        "prefill": _prefill(service, stats),
        "files": _files(service),
    }


def _scheduler(service: Service, stats: Stats, settings: EngineSettings) -> dict[str, Any]:
    depth = settings.mtp_depth if settings.mtp and stats.draft_rounds else 0
    return {
        "ticks": stats.ticks,
        "snapshot_age_ms": service.client.timings.beat_age_ms(),
        "active": stats.active,
        "queued": stats.queued,
        "prefilling": stats.prefilling,
        "slots": stats.slots,
        "pool_blocks_total": stats.blocks_total,
        "pool_blocks_in_use": stats.blocks_in_use,
        "tokens_generated": stats.tokens_generated,
        "requests_finished": stats.requests_finished,
        "requests_cancelled": stats.requests_cancelled,
        "requests_preempted": stats.requests_preempted,
        "prompts_prefilled": stats.prompts_prefilled,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_computed": stats.prompt_tokens_computed,
        "decode_steps": stats.decode_steps,
        "decode_rows": stats.decode_rows,
        "spec_decode": {
            "depth": max(depth, len(stats.drafted_at)),
            "num_drafts_total": stats.draft_rounds,
            "num_draft_tokens_total": stats.draft_tokens,
            "num_accepted_tokens_total": stats.draft_accepted,
            "num_draft_tokens_per_pos_total": list(stats.drafted_at),
            "num_accepted_tokens_per_pos_total": list(stats.accepted_at),
        },
        "step_ms": stats.step_ms,
        "prefill_ms": stats.prefill_ms,
        "kernels_compiled": stats.kernels_compiled,
    }


def _service(service: Service, stats: Stats, settings: EngineSettings) -> dict[str, Any]:
    counters, client, options = service.counters, service.client, service.served.options
    return {
        "requests_total": counters.requests,
        "requests_open": client.open,
        "requests_shed": counters.shed,
        "requests_cancelled": counters.cancelled,
        "requests_failed": counters.failed,
        "engine_failed": client.failure is not None,
        "draining": client.refusal is not None and client.failure is None,
        "pending_admissions": stats.queued,
        "pending_cancellations": client.leaving,
        "queue_limit": options.queue_limit,
        "admission": {
            "mode": settings.admission,
            "window": settings.admission_window,
            "prefill_budget_tokens": settings.prefill_budget_tokens,
            "prefill_idle_budget_tokens": settings.prefill_idle_budget_tokens,
        },
        "tokens_out": counters.tokens,
        "rejects_bad": counters.rejected,
        "tool_calls_out": counters.tool_calls,
    }


def _prefix_cache(service: Service, stats: Stats, settings: EngineSettings) -> dict[str, Any]:
    timings = service.client.timings
    return {
        "enabled": settings.prefix_cache_gib > 0,
        "hits": stats.cache_hits,
        "misses": stats.cache_misses,
        "misses_by_reason": dict(zip(MISS_REASONS, stats.cache_misses_by or (0,) * len(MISS_REASONS), strict=True)),
        "unasked": stats.cache_unasked,
        "tokens_saved": stats.cache_tokens_saved,
        "evictions": stats.cache_evictions,
        "blocks_cached": stats.blocks_cached,
        "arena_snapshots": stats.snapshots_in_use,
        "slots": stats.snapshots_total,
        "min_tokens": settings.prefix_min_tokens,
        "head_cuts": settings.prefix_head_snapshots,
        "ttft_hit_count": timings.hits.count,
        "ttft_hit_ms_avg": timings.hits.mean_ms,
        "ttft_miss_count": timings.misses.count,
        "ttft_miss_ms_avg": timings.misses.mean_ms,
    }


def _files(service: Service) -> dict[str, int]:
    store = service.store
    limit = service.served.options.files.max_storage_bytes
    return {"kept": store.count, "bytes": store.charged, "bytes_limit": limit}


def _prefill(service: Service, stats: Stats) -> dict[str, Any]:
    requests = [
        {
            "id": item.id,
            "slot": item.slot,
            "prompt_tokens": item.prompt_tokens,
            "processed_tokens": item.processed_tokens,
            "cached_tokens": item.cached_tokens,
            "computed_tokens": item.processed_tokens - item.cached_tokens,
            "remaining_tokens": item.prompt_tokens - item.processed_tokens,
            "elapsed_ms": service.client.timings.elapsed_ms(item.id),
        }
        for item in stats.prefills
    ]
    names = ("prompt_tokens", "processed_tokens", "cached_tokens", "computed_tokens", "remaining_tokens")
    return {"requests": requests} | {name: sum(item[name] for item in requests) for name in names}
