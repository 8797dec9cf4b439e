"""Who is taken for lost, and when, on a clock that the test turns."""

from __future__ import annotations

import pytest

from dgpp_core.cluster.records import Heartbeat, Phase
from dgpp_core.cluster.vigil import JUDGE_S, SILENT, STALLED, Fault, Patience, Vigil

PATIENCE = Patience(silent=1.4, stalled=1.6)
NAMES = {rank: f"host{rank}" for rank in range(3)}


class Played:
    """A vigil over three ranks that beat every 0.2 s, each with a phase that began at some time."""

    def __init__(self) -> None:
        self.vigil, self.now = Vigil(NAMES, PATIENCE, 0.0), 0.0
        self.phases: dict[int, tuple[Phase, float]] = dict.fromkeys(NAMES, ("waiting", 0.0))
        self.steps = dict.fromkeys(NAMES, 4)
        self.mute: set[int] = set()

    def until(self, end: float, *, busy: bool = False) -> Fault | None:
        """Play to ``end``; with ``busy``, loops go on with what they do all the time."""
        while self.now < end - 1e-9:
            self.now += JUDGE_S
            for rank in NAMES.keys() - self.mute:
                phase, since = self.phases[rank]
                age = 0.0 if busy else self.now - since
                beat = Heartbeat(step=self.steps[rank], digest=0, phase=phase, age=age, call="collective 9")
                self.vigil.beat(rank, beat, self.now)
            if fault := self.vigil.judge(self.now):
                return fault
        return None

    def go(self, *phases: Phase) -> None:
        """Each rank begins something."""
        self.phases = {rank: (phase, self.now) for rank, phase in enumerate(phases)}


@pytest.fixture
def played() -> Played:
    return Played()


def test_nobody_is_blamed_for_waiting_or_for_working_with_signs(played: Played) -> None:
    assert played.until(1000) is None
    played.go("working", "collective", "working")
    assert played.until(1100, busy=True) is None


def test_a_silent_rank_is_lost_in_time(played: Played) -> None:
    assert played.until(5) is None
    played.mute = {2}
    fault = played.until(9)
    assert fault is not None
    assert fault.weight == SILENT
    assert played.now - 5 <= PATIENCE.silent + JUDGE_S + 1e-6
    assert (fault.error.what, fault.error.where) == ("rank 2 is silent", "host2")
    assert "collective 9" in fault.error.found


def test_the_rank_that_hangs_is_blamed_not_those_that_wait_for_it(played: Played) -> None:
    played.until(5)
    played.go("collective", "working", "collective")
    fault = played.until(9)
    assert fault is not None
    assert (fault.weight, fault.error.what) == (STALLED, "rank 1 hangs")
    assert played.now - 5 <= PATIENCE.stalled + JUDGE_S + 1e-6


def test_all_that_hang_are_named(played: Played) -> None:
    played.until(5)
    played.go("working", "working", "waiting")
    fault = played.until(9)
    assert fault is not None
    assert (fault.error.what, fault.error.where) == ("rank 0, rank 1 hang", "host0, host1")


def test_of_loops_that_wait_for_their_devices_the_one_that_got_least_far_is_blamed(played: Played) -> None:
    played.until(5)
    played.go("working", "waiting", "working")
    played.until(5.1)
    played.phases[1] = ("working", played.now)
    played.steps[1] = 3
    fault = played.until(9)
    assert fault is not None
    assert fault.error.what == "rank 1 hangs"
    assert "rank 0: no sign" in fault.error.found, "what the others do is told"


def test_a_rank_that_was_told_of_a_step_and_has_not_begun_it_is_blamed_not_those_at_work(played: Played) -> None:
    played.until(5)
    played.vigil.tell(5)
    played.go("working", "waiting", "working")
    fault = played.until(9)
    assert fault is not None
    assert fault.error.what == "rank 1 hangs"


def test_a_rank_that_waits_for_a_step_that_nobody_was_told_of_is_not_blamed(played: Played) -> None:
    played.until(5)
    played.vigil.tell(4)
    played.go("working", "waiting", "waiting")
    fault = played.until(9)
    assert fault is not None
    assert fault.error.what == "rank 0 hangs"


def test_a_rank_that_does_not_come_into_a_collective_is_blamed(played: Played) -> None:
    played.until(5)
    played.go("collective", "collective", "waiting")
    fault = played.until(9)
    assert fault is not None
    assert fault.error.what == "rank 2 hangs"


def test_a_collective_of_all_that_does_not_end_is_nobodys_fault(played: Played) -> None:
    played.until(5)
    played.go("collective", "collective", "collective")
    fault = played.until(9)
    assert fault is not None
    assert fault.error.what == "a collective does not end"
    assert "rank 0, rank 1, rank 2" in fault.error.where


def test_what_the_rehearsal_took_is_allowed_four_times_over(played: Played) -> None:
    played.vigil.allow(1.0)
    played.until(5)
    played.go("working", "waiting", "waiting")
    assert played.until(8.9) is None
    assert played.until(9.2) is not None


def test_a_judge_that_was_paused_blames_nobody_for_it(played: Played) -> None:
    played.until(5)
    played.now += 30
    assert played.vigil.judge(played.now) is None
    assert played.until(played.now + 1) is None
    played.mute = {1}
    assert played.until(played.now + 2) is not None


@pytest.mark.parametrize("phase", ["working", "collective"])
def test_ranks_that_were_paused_together_blame_nobody_until_they_hang_anew(played: Played, phase: Phase) -> None:
    played.until(5)
    played.go(phase, phase, phase)
    played.now += 30
    assert played.vigil.judge(played.now) is None
    start = played.now
    assert played.until(start + PATIENCE.stalled - JUDGE_S) is None
    assert played.until(start + PATIENCE.stalled + JUDGE_S) is not None
