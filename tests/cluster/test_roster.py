"""Who is taken into a world, who is not, and with which differences it does not form."""

from __future__ import annotations

import msgspec
import pytest

from dgpp_core.api import EngineError
from dgpp_core.cluster.identity import Build
from dgpp_core.cluster.leader import Leader
from dgpp_core.cluster.records import FromLeader, Gone, Heartbeat, Hello, Vote
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import ENDED, FAILED, JUDGE_S, MISSED, SILENT, Fate, Fault, Patience
from dgpp_core.config.settings import EngineSettings
from dgpp_core.testing.fake_world import BUILD, TERMS, hello

SETTINGS = EngineSettings(kv_capacity=4096)


@pytest.fixture
def leader() -> Leader:
    posted: list[FromLeader] = []
    own = hello(0, 3, epoch=7, settings=msgspec.json.encode(SETTINGS))
    return Leader(own, OperationStream(), lambda ranks, record: posted.append(record), Patience(), 0.0)


@pytest.mark.parametrize(
    ("caller", "named"),
    [
        (hello(1, 3, epoch=6), "epoch 6"), (hello(1, 3, epoch=8), "epoch 8"), (hello(3, 3, epoch=7), "rank 3"),
        (hello(0, 3, epoch=7), "rank 0"), (hello(1, 2, epoch=7), "world of 2"),
    ],
)  # fmt: skip
def test_a_rank_of_another_world_is_refused_alone(leader: Leader, caller: Hello, named: str) -> None:
    assert named in leader.admit(caller, 0.0)
    assert list(leader.missing) == [1, 2]
    assert leader.admit(hello(1, 3, epoch=7), 0.0) == ""
    assert list(leader.missing) == [2]


def test_a_rank_that_comes_twice_is_refused_and_both_are_named(leader: Leader) -> None:
    assert leader.admit(hello(1, 3, epoch=7), 0.0) == ""
    again = msgspec.structs.replace(hello(1, 3, epoch=7), process="elsewhere process 9")
    refused = leader.admit(again, 0.0)
    assert "elsewhere process 9" in refused
    assert "host1 process 1" in refused


@pytest.mark.parametrize("field", Build.__struct_fields__)
def test_another_build_ends_the_start_and_both_values_are_named(leader: Leader, field: str) -> None:
    other = msgspec.structs.replace(BUILD, **{field: "of another"})
    with pytest.raises(EngineError, match=field) as raised:
        leader.admit(hello(2, 3, epoch=7, build=other), 0.0)
    assert "rank 2 (host2 process 2)" in raised.value.where
    assert "of another" in raised.value.found
    assert repr(getattr(BUILD, field)) in raised.value.expected


def test_settings_that_a_rank_insists_on_must_be_rank_0s(leader: Leader) -> None:
    own = msgspec.structs.replace(SETTINGS, max_connections=3, stats_interval_s=1.0)
    assert leader.admit(hello(1, 3, epoch=7, settings=msgspec.json.encode(own)), 0.0) == "", (
        "those are the service's alone"
    )
    other = msgspec.structs.replace(SETTINGS, kv_capacity=8192)
    with pytest.raises(EngineError, match="settings") as raised:
        leader.admit(hello(2, 3, epoch=7, settings=msgspec.json.encode(other)), 0.0)
    assert raised.value.found == "kv_capacity 8192"
    assert "kv_capacity 4096" in raised.value.expected


@pytest.mark.parametrize("field", TERMS.__struct_fields__)
@pytest.mark.parametrize("first", ["rank 0", "rank 2"])
def test_another_vote_is_named_whoever_votes_first(leader: Leader, field: str, first: str) -> None:
    for rank in (1, 2):
        assert leader.admit(hello(rank, 3, epoch=7), 0.0) == ""
    value = getattr(TERMS, field)
    other = msgspec.structs.replace(TERMS, **{field: not value if isinstance(value, bool | int) else "other"})
    assert leader.hear(1, Vote(TERMS), 0.0) is None
    if first == "rank 0":
        assert leader.propose(TERMS, 0.0) is None
        fault = leader.hear(2, Vote(other), 0.0)
    else:
        assert leader.hear(2, Vote(other), 0.0) is None
        fault = leader.propose(TERMS, 0.0)
    assert fault is not None
    assert "rank 2" in fault.error.where
    assert field in fault.error.what
    assert leader.undecided == (2,), "the world does not serve until the fault ends it"


def test_a_rank_that_said_why_it_goes_is_not_blamed_for_going(leader: Leader) -> None:
    """Its collective failed because of another rank; that it ends then must not come before that rank's own account."""
    for rank in (1, 2):
        leader.admit(hello(rank, 3, epoch=7), 0.0)
    fate = Fate(Patience())
    for fault in (
        leader.hear(1, Gone("a collective failed", "", 2, collective=True), 0.0),
        leader.hear(2, Gone("this rank has diverged from rank 0", "", 2), 0.0),
        leader.lost(1, ""),
    ):
        if fault is not None:
            fate.note(fault, 0.0)
    error = fate.sealed(1.0)
    assert error is not None
    assert error.what == "rank 2 failed: this rank has diverged from rank 0"


def test_rank_0_is_named_where_its_own_loop_fails_while_it_serves(leader: Leader) -> None:
    fault = Fault(MISSED, EngineError("a row has no finite logit", where="slot 3"))
    assert leader.own(fault) is fault, "what keeps a world from forming is told as it is"
    for rank in (1, 2):
        leader.admit(hello(rank, 3, epoch=7), 0.0)
        leader.hear(rank, Vote(TERMS), 0.0)
    leader.propose(TERMS, 0.0)
    leader.go(0.0)
    told = leader.own(fault)
    assert (told.weight, told.error.exit_code) == (MISSED, EngineError.exit_code)
    assert told.error.what == "rank 0 failed: a row has no finite logit; where: slot 3"
    assert "host0" in told.error.where


def test_a_rank_that_is_silent_while_it_loads_is_lost_after_a_minute(leader: Leader) -> None:
    own = Heartbeat(step=0, digest=0, phase="loading", age=0.0)
    for rank in (1, 2):
        leader.admit(hello(rank, 3, epoch=7), 0.0)
    found, now = None, 0.0
    while found is None:
        now += JUDGE_S
        leader.hear(1, own, now)
        found = leader.judge(now, own)
        assert now < 100
    assert found.error.what == "rank 2 is silent"
    assert abs(now - Patience().loading) < 1


def test_the_account_nearest_to_the_cause_is_told(leader: Leader) -> None:
    for rank in (1, 2):
        leader.admit(hello(rank, 3, epoch=7), 0.0)
    fate = Fate(Patience(settle=0.15))
    missed = leader.hear(2, Gone("no answer from rank 1", "", 2, collective=True), 10.0)
    assert missed is not None
    assert missed.weight == MISSED
    fate.note(missed, 10.0)
    assert fate.sealed(10.1) is None
    own = leader.hear(1, Gone("a bad weight", "", 2), 10.1)
    assert own is not None
    assert own.weight == FAILED
    fate.note(own, 10.1)
    sealed = fate.sealed(10.16)
    assert sealed is not None
    assert sealed.what == "rank 1 failed: a bad weight"


def test_a_failed_collective_waits_for_its_cause_as_long_as_it_may_and_no_longer_than_that_takes() -> None:
    missed, told = EngineError("no answer from rank 1"), EngineError("rank 0 ends the world")
    fate = Fate(Patience(settle=0.15), missed=1.5)
    fate.note(Fault(MISSED, missed), 10.0)
    assert fate.sealed(11.4) is None
    assert fate.sealed(11.5) is missed
    fate.note(Fault(ENDED, told), 11.0)
    assert fate.sealed(11.0) is told
    other = Fate(Patience(settle=0.15), missed=1.5)
    other.note(Fault(MISSED, missed), 10.0)
    other.note(Fault(FAILED, told), 10.5)
    assert other.sealed(10.6) is None
    assert other.sealed(10.66) is told


def test_silence_is_not_waited_about_any_more() -> None:
    fate, silent = Fate(Patience(settle=0.15)), EngineError("rank 1 is silent")
    fate.note(Fault(MISSED, EngineError("no answer from rank 1")), 9.95)
    fate.note(Fault(SILENT, silent), 10.0)
    assert fate.sealed(10.0) is silent


def test_a_process_that_ended_is_not_waited_about(leader: Leader) -> None:
    leader.admit(hello(1, 3, epoch=7), 0.0)
    lost = leader.lost(1, "")
    assert isinstance(lost, Fault)
    assert lost.weight == ENDED
    fate = Fate(Patience())
    fate.note(lost, 5.0)
    sealed = fate.sealed(5.0)
    assert sealed is not None
    assert (sealed.what, sealed.where) == ("rank 1 is gone", "rank 1 (host1 process 1)")
