"""When an engine counts as failed, on a clock of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from dgpp_core.scheduler.messages import Beat, Stats
from dgpp_core.server.watch import TICK_S, Watch, process_state


def run(watch: Watch, start: float, seconds: float) -> str | None:
    """Tick on time for ``seconds``."""
    for count in range(1, round(seconds / TICK_S) + 1):
        if reason := watch.tick(start + count * TICK_S):
            return reason
    return None


def test_a_beating_idle_engine_is_well() -> None:
    watch = Watch(0.0, lambda: "S")
    for second in range(400):
        watch.beat(Beat(3, False, Stats()), float(second))
        assert run(watch, float(second), 1.0) is None


def test_silence() -> None:
    watch = Watch(0.0, lambda: "S")
    assert run(watch, 0.0, 4.8) is None
    reason = watch.tick(5.0)
    assert reason is not None
    assert "not answered" in reason


def test_stopped_process() -> None:
    state = ["S"]
    watch = Watch(0.0, lambda: state[0])
    assert run(watch, 0.0, 2.0) is None
    state[0] = "T"
    reason = watch.tick(2.2)
    assert reason is not None
    assert "stopped" in reason
    fresh = Watch(0.0, lambda: "T")
    assert run(fresh, 0.0, 1.0) is None


def test_our_own_pause_is_not_the_engines() -> None:
    watch = Watch(0.0, lambda: "T")
    assert run(watch, 0.0, 1.0) is None
    assert watch.tick(61.0) is None
    assert run(watch, 61.0, 1.0) is None
    assert run(watch, 62.0, 1.0) is not None


def test_no_progress_while_busy() -> None:
    watch = Watch(0.0, lambda: "S")
    reason = None
    now = 0.0
    while reason is None and now < 200:
        watch.beat(Beat(9, True, Stats()), now)
        now = round(now + TICK_S, 6)
        reason = watch.tick(now)
    assert reason is not None
    assert "no progress" in reason
    assert 120 <= now <= 121


def test_progress_or_idleness_keeps_a_busy_engine_well() -> None:
    for beats in (lambda step: Beat(step // 100, True, Stats()), lambda step: Beat(9, step % 400 != 0, Stats())):
        watch = Watch(0.0, lambda: "S")
        for step in range(1, 3000):
            watch.beat(beats(step), step * TICK_S)
            assert watch.tick(step * TICK_S) is None


def test_process_state(wait_for: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: process_state(process.pid) == "T")
        process.kill()
    assert process_state(process.pid) == ""
