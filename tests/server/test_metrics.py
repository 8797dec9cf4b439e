"""Counters in both forms, before and after requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dgpp_core.config.settings import EngineSettings
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.scheduler.messages import VERSION, Ending, Output, PrefillProgress, Ready, Stats, Submit, Update
from dgpp_core.server.engine_client import EngineClient, Inbox
from dgpp_core.server.timings import Timings
from dgpp_core.testing.fake_worker import FakeScript


def samples(running: Any) -> dict[str, float]:
    """The Prometheus samples of one model, by name."""
    text = httpx.get(running.url + "/metrics", headers={"accept": "text/plain"}).text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["model_name"] == "fake" for sample in found if sample.name.startswith("dgpp_"))
    return {sample.name: sample.value for sample in found if sample.labels.get("prefix_cache") != "miss"}


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
    assert text["dgpp_time_to_first_token_seconds_count"] == 3  # choices, which the engine knows each
    assert text["dgpp_request_decode_time_seconds_count"] == 3
    assert text["dgpp_inter_token_latency_seconds_count"] == usage["completion_tokens"] - 3
    assert after["prefix_cache"]["ttft_hit_count"] == 3
    assert after["prefix_cache"]["ttft_hit_ms_avg"] > 0
    assert after["prefix_cache"]["ttft_miss_count"] == 0
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


STATS = Stats(
    blocks_total=10, blocks_in_use=6, blocks_cached=2, snapshots_total=4, snapshots_in_use=1, requests_preempted=3,
    prompt_tokens=100, prompt_tokens_computed=60, cache_tokens_saved=40, cache_hits=2, cache_misses=1,
    cache_misses_by=(0, 0, 0, 1, 0, 0), cache_unasked=5, draft_rounds=9,
    draft_tokens=18, draft_accepted=10, drafted_at=(9, 9), accepted_at=(7, 3), kernels_compiled=1, step_ms=1500.0,
    prefills=(PrefillProgress(id=7, slot=2, prompt_tokens=50, processed_tokens=30, cached_tokens=10),
              PrefillProgress(id=8, slot=3, prompt_tokens=5, processed_tokens=0, cached_tokens=0)),
)  # fmt: skip


def test_what_the_engine_says_is_in_both_forms(serve_fake: Any, wait_for: Any) -> None:
    settings = msgspec.json.encode(EngineSettings(admission="grow", mtp_depth=2))
    with serve_fake(FakeScript(stats=STATS), settings=settings) as running:
        wait_for(lambda: running.metrics()["scheduler"]["pool_blocks_total"] == 10)
        found, text = running.metrics(), samples(running)
        lines = httpx.get(running.url + "/metrics", headers={"accept": "text/plain"}).text
    assert found["scheduler"]["spec_decode"] == {
        "depth": 2, "num_drafts_total": 9, "num_draft_tokens_total": 18, "num_accepted_tokens_total": 10,
        "num_draft_tokens_per_pos_total": [9, 9], "num_accepted_tokens_per_pos_total": [7, 3],
    }  # fmt: skip
    assert found["scheduler"]["kernels_compiled"] == text["dgpp_kernels_compiled_total"] == 1
    assert 0 <= found["scheduler"]["snapshot_age_ms"] < 5000
    assert found["service"]["admission"]["mode"] == "grow"
    assert found["service"]["queue_limit"] == text["dgpp_queue_limit"] == 64
    assert found["prefix_cache"]["tokens_saved"] == text["dgpp_prompt_tokens_cached_total"] == 40
    assert found["prefix_cache"]["misses_by_reason"]["evicted"] == found["prefix_cache"]["misses"] == 1
    assert found["prefix_cache"]["unasked"] == text["dgpp_prefix_cache_unasked_total"] == 5
    why = 'dgpp_prefix_cache_misses_by_reason_total{model_name="fake",reason="evicted"} 1.0'
    assert why in lines.splitlines()
    assert text["dgpp_kv_cache_usage_perc"] == 0.6
    assert text["dgpp_decode_step_seconds_total"] == 1.5
    assert (text["dgpp_prefill_prompt_tokens"], text["dgpp_prefill_processed_tokens"]) == (55, 30)
    assert text["spec_decode_num_accepted_tokens_total"] == text["dgpp_spec_decode_num_accepted_tokens_total"] == 10
    place = 'dgpp_spec_decode_num_accepted_tokens_per_pos_total{model_name="fake",position="1"} 3.0'
    assert place in lines.splitlines()
    first = found["prefill"]["requests"][0]
    assert (first["computed_tokens"], first["remaining_tokens"]) == (20, 20)
    sums = {name: found["prefill"][name] for name in ("prompt_tokens", "processed_tokens", "remaining_tokens")}
    assert sums == {"prompt_tokens": 55, "processed_tokens": 30, "remaining_tokens": 25}


def test_a_choice_whose_client_left_is_counted_until_the_engine_lets_go() -> None:
    sent: list[Any] = []
    ready = Ready(version=VERSION, pid=1, vocab_size=9, context_tokens=9, position_ceiling=9, pool_tokens=9,
                  row_exact=True, load_seconds=0, plan="")  # fmt: skip
    client = EngineClient(sent.extend, ready, capacity=4)
    submits = [Submit(id=number, tokens=(1,), max_tokens=5, params=SamplingParams()) for number in client.ids(2)]
    client.submit(submits, Inbox())
    client.cancel(submits[0].id)
    assert (client.open, client.leaving) == (2, 1)
    client.receive(Output((), (Ending(submits[0].id, "cancelled"),)))
    assert (client.open, client.leaving) == (1, 0)


def test_times_are_those_of_the_clock() -> None:
    now = [10.0]
    timings = Timings(lambda: now[0], "fake")
    timings.sent([Submit(id=1, tokens=(1,), max_tokens=5, params=SamplingParams())])

    def comes(after: float, *updates: Update, endings: tuple[Ending, ...] = ()) -> None:
        now[0] += after
        timings.came(Output(updates, endings))

    comes(0.5, Update(1, (4,)))
    assert timings.elapsed_ms(1) == 500
    comes(0.25, Update(1, (5, 6)))
    comes(0.125, Update(1, (7,)), Update(99, (1,)), endings=(Ending(1, "eos"), Ending(99, "eos")))
    assert timings.elapsed_ms(1) == 0
    assert (timings.misses.count, timings.misses.mean_ms, timings.hits.count) == (1, 500, 0)
    found = {
        (sample.name, sample.labels.get("prefix_cache")): sample.value
        for family in timings.collect() for sample in family.samples
    }  # fmt: skip
    assert found["dgpp_time_to_first_token_seconds_sum", "miss"] == 0.5
    assert found["dgpp_inter_token_latency_seconds_sum", None] == 0.375
    assert found["dgpp_inter_token_latency_seconds_count", None] == 2
    samples_of = {family.name: family.samples for family in timings.collect()}["dgpp_inter_token_latency_seconds"]
    buckets = {sample.labels["le"]: sample.value for sample in samples_of if "le" in sample.labels}
    assert [buckets[bound] for bound in ("0.1", "0.25", "0.5", "+Inf")] == [0, 2, 2, 2]  # 0.25 s is not above 0.25 s
    assert found["dgpp_request_decode_time_seconds_sum", None] == 0.375


def test_every_metric_is_in_the_operating_page(serve_fake: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")
    with serve_fake(FakeScript(stats=STATS)) as running:
        text = httpx.get(running.url + "/metrics", headers={"accept": "text/plain"}).text
        found = running.metrics()
    families = {family.name for family in text_string_to_metric_families(text)}
    families -= {name for name in families if name.endswith("_created")}
    assert len(families) > 40
    assert [name for name in sorted(families) if f"`{name.removeprefix('dgpp_')}`" not in page] == []
    keys = {key for part in found.values() for key in part} | set(found["scheduler"]["spec_decode"])
    keys.remove("spec_decode")
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_prefill_progress_sums(serve_fake: Any) -> None:
    with serve_fake(FakeScript()) as running:
        assert running.metrics()["prefill"] == {
            "requests": [], "prompt_tokens": 0, "processed_tokens": 0, "cached_tokens": 0, "computed_tokens": 0,
            "remaining_tokens": 0,
        }  # fmt: skip
