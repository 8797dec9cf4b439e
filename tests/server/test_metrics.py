"""Counters in both forms, before and after requests."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dgpp_core.testing.fake_worker import FakeScript


def samples(running: Any) -> dict[str, float]:
    """The Prometheus samples of one model, by name."""
    text = httpx.get(running.url + "/metrics", headers={"accept": "text/plain"}).text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_requests_are_counted_once_whatever_n(serve_fake: Any, wait_for: Any) -> None:
    with serve_fake(FakeScript(cached_tokens=2)) as running:
        before = running.metrics()
        usage = running.chat(n=3).json()["usage"]
        running.chat(temperature=9)
        wait_for(lambda: running.metrics()["scheduler"]["requests_finished"] == 3)
        after = running.metrics()
        text = samples(running)
    assert before["service"]["requests_total"] == 0
    assert after["service"]["requests_total"] == 1
    assert after["service"]["rejects_bad"] == 1
    assert after["service"]["tokens_out"] == usage["completion_tokens"]
    assert after["scheduler"]["tokens_generated"] == usage["completion_tokens"]
    assert _shape(before) == _shape(after)
    assert text["dgpp_requests_total"] == 1
    assert text["dgpp_requests_rejected_total"] == 1
    assert text["dgpp_generation_tokens_total"] == usage["completion_tokens"]
    assert text["dgpp_time_to_first_token_seconds_count"] == 1
    assert text["dgpp_request_generation_tokens_sum"] == usage["completion_tokens"]
    assert text["dgpp_engine_failed"] == 0


def _shape(value: Any) -> Any:
    return {key: _shape(child) for key, child in value.items()} if isinstance(value, dict) else type(value).__name__


def test_both_routes_and_all_forms(fake: Any) -> None:
    assert _shape(httpx.get(fake.url + "/v1/metrics").json()) == _shape(fake.metrics())
    plain = httpx.get(fake.url + "/metrics", headers={"accept": "text/plain;version=0.0.4"})
    assert plain.headers["content-type"].startswith("text/plain")
    scraper = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    openmetrics = httpx.get(fake.url + "/v1/metrics", headers={"accept": scraper})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_prefill_progress_sums(serve_fake: Any) -> None:
    with serve_fake(FakeScript()) as running:
        assert running.metrics()["prefill"] == {
            "requests": [], "prompt_tokens": 0, "processed_tokens": 0, "cached_tokens": 0, "computed_tokens": 0,
            "remaining_tokens": 0,
        }  # fmt: skip
