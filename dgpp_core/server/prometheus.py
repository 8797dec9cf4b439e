"""The same counters in the Prometheus and OpenMetrics text forms, with the histograms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics_exposition

from dgpp_core import __version__
from dgpp_core.scheduler.messages import MISS_REASONS
from dgpp_core.server.service import Service

PROMETHEUS_TYPE = CONTENT_TYPE_LATEST
OPENMETRICS_TYPE = openmetrics_exposition.CONTENT_TYPE_LATEST

Rows = dict[str, tuple[str, float]]


def prometheus_text(service: Service, *, openmetrics: bool) -> bytes:
    """Everything in one of the two forms."""
    registry = CollectorRegistry()
    for source in (service.registry, service.client.timings, _Snapshot(service)):
        registry.register(source)
    write = openmetrics_exposition.generate_latest if openmetrics else generate_latest
    text: bytes = write(registry)
    return text


class _Snapshot:
    """A Prometheus collector over one moment's counters."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.served.options.served_id

    def collect(self) -> Iterable[Metric]:
        model = self._model
        for name, (about, value) in self._gauges().items():
            gauge = GaugeMetricFamily(f"dgpp_{name}", about, labels=("model_name",))
            gauge.add_metric((model,), value)
            yield gauge
        for name, (about, value) in self._totals().items():
            total = CounterMetricFamily(f"dgpp_{name}", about, labels=("model_name",))
            total.add_metric((model,), value)
            yield total
        build = GaugeMetricFamily("dgpp_build_info", "1, with the version.", labels=("model_name", "version"))
        build.add_metric((model, __version__), 1)
        yield build
        finished = CounterMetricFamily("dgpp_request_finished", "Choices.", labels=("model_name", "reason"))
        reasons = self._service.counters.finished
        for reason in sorted({"stop", "length", "tool_calls", *reasons}):
            finished.add_metric((model, reason), reasons[reason])
        yield finished
        yield self._misses()
        yield from self._drafts()

    def _gauges(self) -> Rows:
        stats, client, options = self._service.client.stats, self._service.client, self._service.served.options
        return {
            "num_requests_running": ("Requests in a slot.", stats.active),
            "num_requests_waiting": ("Requests in the queue.", stats.queued),
            "num_requests_prefilling": ("Requests whose prompt is computed.", stats.prefilling),
            "num_requests_open": ("Choices that have not ended in the engine.", client.open),
            "num_requests_cancelling": ("Choices without a client that have not ended in the engine.", client.leaving),
            "kv_pool_blocks": ("KV blocks.", stats.blocks_total),
            "kv_pool_blocks_in_use": ("KV blocks that requests or the prefix cache hold.", stats.blocks_in_use),
            "kv_pool_blocks_cached": ("KV blocks that the prefix cache alone holds.", stats.blocks_cached),
            "kv_cache_usage_perc": ("Share of the KV blocks in use.", stats.blocks_in_use / (stats.blocks_total or 1)),
            "prefix_cache_snapshots": ("Snapshots of state in use.", stats.snapshots_in_use),
            "prefix_cache_snapshot_slots": ("Snapshots of state that there is room for.", stats.snapshots_total),
            "prefill_prompt_tokens": (
                "Tokens of the prompts being read.",
                sum(p.prompt_tokens for p in stats.prefills),
            ),
            "prefill_processed_tokens": ("Those that have been.", sum(p.processed_tokens for p in stats.prefills)),
            "files_kept": ("Uploaded files.", self._service.store.count),
            "files_kept_bytes": ("What they count for against the limit.", self._service.store.charged),
            "engine_failed": ("1 once the engine has failed.", int(client.failure is not None)),
            "snapshot_age_seconds": ("Age of the engine's counters.", client.timings.beat_age_ms() / 1e3),
            "queue_limit": ("Requests that may wait.", options.queue_limit),
            "max_concurrent_requests": ("Slots.", options.slots),
        }

    def _totals(self) -> Rows:
        stats, counters = self._service.client.stats, self._service.counters
        return {
            "prompt_tokens": ("Prompt tokens.", stats.prompt_tokens),
            "prompt_tokens_computed": ("Prompt tokens computed.", stats.prompt_tokens_computed),
            "prompt_tokens_cached": ("Prompt tokens that the prefix cache had.", stats.cache_tokens_saved),
            "generation_tokens": ("Tokens generated.", stats.tokens_generated),
            "requests": ("Requests that reached admission.", counters.requests),
            "requests_shed": ("Requests refused for want of room.", counters.shed),
            "requests_cancelled": ("Requests whose client left.", counters.cancelled),
            "requests_failed": ("Requests that the engine failed.", counters.failed),
            "requests_rejected": ("Requests that were at fault.", counters.rejected),
            "requests_preempted": ("Choices that lost their slot for a while.", stats.requests_preempted),
            "tool_calls": ("Calls that replies made.", counters.tool_calls),
            "prompts_prefilled": ("Prompts read to their end.", stats.prompts_prefilled),
            "decode_steps": ("Decode steps.", stats.decode_steps),
            "decode_rows": ("Rows of decode steps.", stats.decode_rows),
            "decode_step_seconds": ("Time of steps that decoded.", stats.step_ms / 1e3),
            "prefill_seconds": ("Time of steps that only read prompts.", stats.prefill_ms / 1e3),
            "kernels_compiled": ("Kernels that first appeared after the start.", stats.kernels_compiled),
            "prefix_cache_hits": ("Prompts with a cached prefix.", stats.cache_hits),
            "prefix_cache_misses": ("Prompts without one.", stats.cache_misses),
            "prefix_cache_unasked": ("Prompts that were not looked up: opted out, or no cache.", stats.cache_unasked),
            "prefix_cache_evictions": ("Prefixes dropped.", stats.cache_evictions),
        }

    def _misses(self) -> Metric:
        family = CounterMetricFamily(
            "dgpp_prefix_cache_misses_by_reason", "Prompts without a cached prefix.", labels=("model_name", "reason")
        )
        counts = self._service.client.stats.cache_misses_by or (0,) * len(MISS_REASONS)
        for reason, count in zip(MISS_REASONS, counts, strict=True):
            family.add_metric((self._model, reason.replace(" ", "_")), count)
        return family

    def _drafts(self) -> Iterable[Metric]:
        """Drafting twice: under our names, and under three that scrapers know from elsewhere."""
        stats = self._service.client.stats
        for name, about, value in (
            ("num_drafts", "Verification rounds.", stats.draft_rounds),
            ("num_draft_tokens", "Drafted tokens.", stats.draft_tokens),
            ("num_accepted_tokens", "Drafted tokens that stood.", stats.draft_accepted),
        ):
            own = CounterMetricFamily(f"dgpp_spec_decode_{name}", about, labels=("model_name",))
            own.add_metric((self._model,), value)
            yield own
            yield CounterMetricFamily(f"spec_decode_{name}", about, value=value)
        yield self._by_place("draft", "Drafted tokens by their place in a step.", stats.drafted_at)
        yield self._by_place("accepted", "Those that stood, by their place in a step.", stats.accepted_at)

    def _by_place(self, name: str, about: str, counts: Sequence[int]) -> Metric:
        family = CounterMetricFamily(
            f"dgpp_spec_decode_num_{name}_tokens_per_pos", about, labels=("model_name", "position")
        )
        for position, value in enumerate(counts):
            family.add_metric((self._model, str(position)), value)
        return family
