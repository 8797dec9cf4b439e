"""The line of statistics: its numbers are those of the time that it is about, and nothing is said while idle."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dgpp_core.config.settings import EngineSettings
from dgpp_core.scheduler.messages import Stats
from dgpp_core.server.counters import Counters
from dgpp_core.server.logs import JsonFormatter
from dgpp_core.server.statistics import Reporter
from dgpp_core.testing.fake_worker import FakeScript

IDLE = Stats(slots=4, blocks_total=100, blocks_in_use=20, snapshots_total=8, snapshots_in_use=2)


def test_a_line_is_about_what_happened_since_the_last_one() -> None:
    counters, now = Counters(CollectorRegistry(), "tiny"), [100.0]
    before = msgspec.structs.replace(
        IDLE, tokens_generated=1000, decode_steps=500, step_ms=9000.0, prompts_prefilled=10, draft_tokens=70
    )
    reporter = Reporter(lambda: now[0], before, counters)
    now[0] = 110.0
    counters.requests, counters.shed, counters.cancelled = 5, 1, 2
    after = msgspec.structs.replace(
        before, tokens_generated=1203, decode_steps=600, step_ms=13_000.0, prompts_prefilled=13, prefill_ms=1500.0,
        prompt_tokens_computed=4000, cache_tokens_saved=96, draft_tokens=170, draft_accepted=60, active=2, queued=1,
        blocks_in_use=30,
    )  # fmt: skip
    line = reporter.line(after, counters)
    assert line is not None
    assert (line.decode_tokens, line.decode_tokens_s) == (200, 20.0)
    assert (line.decode_steps, line.step_ms, line.decode_share) == (100, 40.0, 0.4)
    assert (line.drafts, line.drafts_accepted) == (100, 60)
    assert (line.prompts, line.prefill_tokens, line.prefill_tokens_s, line.prefill_share) == (3, 4000, 400.0, 0.15)
    assert line.text() == (
        "10.0 s | decode 200 tokens, 20.0/s, 100 steps of 40.00 ms, 40% | drafts 60/100 stood"
        " | prefill 3 prompts, 4000 tokens, 400.0/s, 15%, 96 cached | running 2, reading 0, queued 1 | blocks 30/100"
        " | snapshots 2/8 | requests 5, shed 1, cancelled 2, failed 0"
    )


def test_there_is_one_line_after_the_work_and_none_while_idle() -> None:
    counters, now = Counters(CollectorRegistry(), "tiny"), [0.0]
    reporter = Reporter(lambda: now[0], IDLE, counters)
    busy = msgspec.structs.replace(IDLE, active=1, ticks=5)
    done = msgspec.structs.replace(IDLE, tokens_generated=5, decode_steps=4)
    said = []
    for stats in (IDLE, IDLE, busy, busy, done, done, done, done):
        now[0] += 1
        said.append(reporter.line(stats, counters))
    assert [line is not None for line in said] == [False, False, True, True, True, True, False, False]
    last = said[5]
    assert last is not None
    assert (last.decode_tokens, last.decode_steps, last.requests, last.running) == (0, 0, 0, 0)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.name == "dgpp.stats"]
    return [json.loads(JsonFormatter().format(record)) for record in records]


def test_a_service_says_what_it_does(
    serve_fake: Any, wait_for: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    settings = msgspec.json.encode(EngineSettings(stats_interval_s=0.1))
    with caplog.at_level(logging.INFO, "dgpp.stats"), serve_fake(FakeScript(), settings=settings) as running:
        running.chat()
        running.chat()
        wait_for(lambda: sum(line["requests"] for line in lines(caplog)) == 2)
        wait_for(lambda: lines(caplog)[-1]["requests"] == 0)
        said = len(lines(caplog))
        time.sleep(0.5)
        assert len(lines(caplog)) == said


def test_an_interval_of_0_says_nothing(serve_fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = msgspec.json.encode(EngineSettings(stats_interval_s=0))
    with caplog.at_level(logging.INFO, "dgpp.stats"), serve_fake(FakeScript(), settings=settings) as running:
        running.chat()
        time.sleep(0.2)
    assert lines(caplog) == []
