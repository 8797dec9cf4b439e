"""Keys of a draft schedule that an engine cannot act on are named, and only those."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cluster.boot import Assignment, build
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.config.settings import SCHEDULE_KEYS, EngineSettings
from dgpp_core.engine.geometry import Geometry
from dgpp_core.host.loading import load_plugins
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.sizing import idle_schedule, limits_from

OTHER: dict[str, Any] = {
    "mtp_schedule_row_ms": 2.0,
    "mtp_schedule_base_ms": 5.0,
    "mtp_schedule_lambda": 0.045,
    "mtp_schedule_adapt": False,
    "mtp_schedule_sampled_scale": 0.5,
}


def limits_of(settings: EngineSettings, confident: bool) -> Limits:
    geometry = Geometry(
        slots=1, blocks=10, block_tokens=64, snapshots=0, step_width=1 + settings.mtp_depth, context=100
    )
    return limits_from(geometry, settings, needs_snapshot=False, confident=confident)


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("keys", [keys for n in range(6) for keys in itertools.combinations(OTHER, n)])
def test_what_is_named_is_what_acts_on_nothing(keys: tuple[str, ...], confident: bool) -> None:
    settings = EngineSettings(mtp_depth=4, mtp_schedule=True, **{key: OTHER[key] for key in keys})
    named = set(idle_schedule(settings, limits_of(settings, confident)))
    if not confident:
        assert named == {"mtp_schedule_lambda", "mtp_schedule_adapt", "mtp_schedule_sampled_scale"} & set(keys)
    else:
        fixed = {"mtp_schedule_lambda", "mtp_schedule_adapt"} <= set(keys)
        assert named == ({"mtp_schedule_base_ms"} & set(keys) if fixed else set())


@pytest.mark.parametrize(("depth", "least"), [(1, 1), (2, 2), (4, 3), (5, 5)])
def test_a_schedule_that_has_one_depth_is_named(depth: int, least: int) -> None:
    settings = EngineSettings(mtp_depth=depth, mtp_schedule=True, mtp_schedule_min_depth=least, mtp_schedule_lambda=0.1)
    found = idle_schedule(settings, limits_of(settings, confident=True))
    why = f"every step drafts {depth}: there is nothing to choose"
    assert found == {"mtp_schedule": why, "mtp_schedule_lambda": why}


def test_without_a_schedule_nothing_is_said_twice() -> None:
    settings = EngineSettings(**OTHER)
    assert idle_schedule(settings, limits_of(settings, confident=True)) == {}
    assert {*OTHER, "mtp_schedule_min_depth"} == set(SCHEDULE_KEYS)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_so_when_it_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture, rank: int) -> None:
    """With a model that has no drafter."""
    model = load_plugins(environ={}).model("smollm2")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4, dtype="F32")
    settings = EngineSettings(
        max_concurrency=2, kv_capacity=512, block_tokens=16, prefix_cache_gib=0.0, mtp_schedule=True
    )
    what = Assignment(model=model, checkpoint=tmp_path, device="cpu", settings=settings, rank=rank)
    with caplog.at_level(logging.WARNING):
        build(what, lambda device: None, lambda stage, done, total: None, Pulse(time.monotonic))
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    line = "engine.mtp_schedule has no effect: every step drafts 0: there is nothing to choose"
    assert said == ([] if rank else [line])
