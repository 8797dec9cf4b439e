"""Counters as JSON and as Prometheus text: one snapshot, two forms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics_exposition

from dgpp_core.scheduler.messages import Stats
from dgpp_core.server.service import Service

PROMETHEUS_TYPE = CONTENT_TYPE_LATEST
OPENMETRICS_TYPE = openmetrics_exposition.CONTENT_TYPE_LATEST


def json_metrics(service: Service) -> dict[str, Any]:
    """Counters since the start and gauges of now; the engine's part is as old as its last beat (0.2 s)."""
    stats = service.client.stats
    return {
        "scheduler": _scheduler(stats),
        "service": _service(service),
        "prefix_cache": _prefix_cache(stats),
        "prefill": _prefill(stats),
    }


def _scheduler(stats: Stats) -> dict[str, Any]:
    return {
        "ticks": stats.ticks,
        "active": stats.active,
        "queued": stats.queued,
        "prefilling": stats.prefilling,
        "slots": stats.slots,
        "pool_blocks_total": stats.blocks_total,
        "pool_blocks_in_use": stats.blocks_in_use,
        "tokens_generated": stats.tokens_generated,
        "requests_finished": stats.requests_finished,
        "requests_preempted": stats.requests_preempted,
        "prompts_prefilled": stats.prompts_prefilled,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_computed": stats.prompt_tokens_computed,
        "decode_steps": stats.decode_steps,
        "decode_rows": stats.decode_rows,
        "spec_decode": {
            "num_drafts_total": stats.draft_rounds,
            "num_draft_tokens_total": stats.draft_tokens,
            "num_accepted_tokens_total": stats.draft_accepted,
            "num_draft_tokens_per_pos": list(stats.drafted_at),
            "num_accepted_tokens_per_pos": list(stats.accepted_at),
        },
        "step_ms": stats.step_ms,
        "prefill_ms": stats.prefill_ms,
    }


def _service(service: Service) -> dict[str, Any]:
    counters, client = service.counters, service.client
    return {
        "requests_total": counters.requests,
        "requests_open": client.open,
        "requests_shed": counters.shed,
        "requests_cancelled": counters.cancelled,
        "requests_failed": counters.failed,
        "engine_failed": client.failure is not None,
        "tokens_out": counters.tokens,
        "rejects_bad": counters.rejected,
        "tool_calls_out": counters.tool_calls,
    }


def _prefix_cache(stats: Stats) -> dict[str, Any]:
    return {
        "hits": stats.cache_hits,
        "misses": stats.cache_misses,
        "tokens_saved": stats.cache_tokens_saved,
        "evictions": stats.cache_evictions,
        "blocks_cached": stats.blocks_cached,
        "arena_snapshots": stats.snapshots_in_use,
        "slots": stats.snapshots_total,
    }


def _prefill(stats: Stats) -> dict[str, Any]:
    requests = [
        {
            "id": item.id,
            "slot": item.slot,
            "prompt_tokens": item.prompt_tokens,
            "processed_tokens": item.processed_tokens,
            "cached_tokens": item.cached_tokens,
            "computed_tokens": item.processed_tokens - item.cached_tokens,
            "remaining_tokens": item.prompt_tokens - item.processed_tokens,
        }
        for item in stats.prefills
    ]
    names = ("prompt_tokens", "processed_tokens", "cached_tokens", "computed_tokens", "remaining_tokens")
    return {"requests": requests} | {name: sum(item[name] for item in requests) for name in names}


def prometheus_text(service: Service, *, openmetrics: bool) -> bytes:
    """The same as text, with the latency histograms."""
    registry = CollectorRegistry()
    registry.register(service.registry)
    registry.register(_Snapshot(service))
    write = openmetrics_exposition.generate_latest if openmetrics else generate_latest
    text: bytes = write(registry)
    return text


class _Snapshot:
    """A Prometheus collector over one moment's counters."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        stats, counters, client = self._service.client.stats, self._service.counters, self._service.client
        options = self._service.served.options
        model = options.served_id
        gauges = {
            "num_requests_running": ("Requests in a slot.", stats.active),
            "num_requests_waiting": ("Requests in the queue.", stats.queued),
            "num_requests_prefilling": ("Requests whose prompt is computed.", stats.prefilling),
            "kv_pool_blocks": ("KV blocks.", stats.blocks_total),
            "kv_pool_blocks_in_use": ("KV blocks that requests hold.", stats.blocks_in_use),
            "kv_cache_usage_perc": ("Share of the KV blocks in use.", stats.blocks_in_use / (stats.blocks_total or 1)),
            "engine_failed": ("1 once the engine has failed.", int(client.failure is not None)),
            "queue_limit": ("Requests that may wait.", options.queue_limit),
            "max_concurrent_requests": ("Slots.", options.slots),
        }
        totals = {
            "prompt_tokens": ("Prompt tokens.", stats.prompt_tokens),
            "prompt_tokens_computed": ("Prompt tokens computed.", stats.prompt_tokens_computed),
            "prompt_tokens_cached": ("Prompt tokens that the prefix cache had.", stats.cache_tokens_saved),
            "generation_tokens": ("Tokens generated.", stats.tokens_generated),
            "requests": ("Requests that reached admission.", counters.requests),
            "requests_shed": ("Requests refused for want of room.", counters.shed),
            "requests_cancelled": ("Requests whose client left.", counters.cancelled),
            "requests_failed": ("Requests that the engine failed.", counters.failed),
            "requests_rejected": ("Requests that were at fault.", counters.rejected),
            "decode_steps": ("Decode steps.", stats.decode_steps),
            "decode_rows": ("Rows of decode steps.", stats.decode_rows),
            "prefix_cache_hits": ("Prompts with a cached prefix.", stats.cache_hits),
            "prefix_cache_misses": ("Prompts without one.", stats.cache_misses),
            "prefix_cache_evictions": ("Prefixes dropped.", stats.cache_evictions),
        }
        for name, (about, value) in gauges.items():
            gauge = GaugeMetricFamily(f"dgpp_{name}", about, labels=("model_name",))
            gauge.add_metric((model,), value)
            yield gauge
        for name, (about, value) in totals.items():
            total = CounterMetricFamily(f"dgpp_{name}", about, labels=("model_name",))
            total.add_metric((model,), value)
            yield total
        finished = CounterMetricFamily("dgpp_request_finished", "Choices.", labels=("model_name", "reason"))
        for reason in ("stop", "length"):
            finished.add_metric((model, reason), counters.finished[reason])
        yield finished
        yield CounterMetricFamily("spec_decode_num_drafts", "Verification rounds.", value=stats.draft_rounds)
        yield CounterMetricFamily("spec_decode_num_draft_tokens", "Drafted tokens.", value=stats.draft_tokens)
        yield CounterMetricFamily("spec_decode_num_accepted_tokens", "Accepted.", value=stats.draft_accepted)
        for name, at in (("draft", stats.drafted_at), ("accepted", stats.accepted_at)):
            places = CounterMetricFamily(
                f"spec_decode_num_{name}_tokens_per_pos", "By place in a step.", labels=("position",)
            )
            for position, value in enumerate(at):
                places.add_metric((str(position),), value)
            yield places
