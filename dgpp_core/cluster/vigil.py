"""When is a rank taken for lost? Pure: the clock is an argument, and so is everything that was heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.records import Heartbeat

BEAT_S = 0.2
"""How often every rank sends a heartbeat."""
JUDGE_S = 0.1
"""How often it looks whether the others have."""
OWN_PAUSE_S = 0.5
"""Lateness of our own look that makes the silence measured in it ours."""
MARGIN = 4.0
"""A loop may be without a sign for so many times what it took in the rehearsal, which runs the largest shapes."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds.

    Attributes:
        silent: without a frame, after which a rank is lost.
        loading: the same before `Go`, when a library that loads or compiles may keep the interpreter.
        stalled: without a sign of a loop that computes or waits in a collective, after which it hangs; more where the
            rehearsal took long, see `MARGIN`.
        settle: how long the first of several faults waits for the others, one of which may be its cause.
        leave: how long ranks may take to end in order.
    """

    silent: float = 1.4
    loading: float = 60.0
    stalled: float = 1.6
    settle: float = 0.15
    leave: float = 5.0


class Fault(msgspec.Struct, frozen=True, eq=False):
    """One account of why a world ends.

    Attributes:
        weight: how far from the cause, `CAUSES` from the nearest on.
    """

    weight: int
    error: DgppError


ENDED, FAILED, DIFFERS, SILENT, STALLED, MISSED = CAUSES = range(6)
"""A process ended; a rank says what failed; a digest differs; a rank is silent; it hangs; a collective failed."""


def while_loading(patience: Patience) -> Patience:
    """What holds before `Go`."""
    return msgspec.structs.replace(patience, silent=patience.loading)


class Vigil:
    """Judges other ranks by what comes from them.

    Args:
        names: rank to who it is, of those that are watched.
        now: the current time in seconds, as in every method.
    """

    def __init__(self, names: Mapping[int, str], patience: Patience, now: float) -> None:
        self._names, self._patience = dict(names), patience
        self._heard = dict.fromkeys(names, now)
        self._beats: dict[int, tuple[Heartbeat, float]] = {}
        self._judged = self._awake = now
        self._stalled = patience.stalled
        self._told = 0

    def watch(self, rank: int, name: str, now: float) -> None:
        """Watch one rank more."""
        self._names[rank] = name
        self._heard[rank] = now

    def allow(self, longest: float) -> None:
        """A loop may take as long as ``longest`` for one thing, with a margin."""
        self._stalled = max(self._stalled, MARGIN * longest)

    def tell(self, step: int) -> None:
        """All have been told to take ``step``; any thread."""
        self._told = step

    def hear(self, rank: int, now: float) -> None:
        """A frame came."""
        self._heard[rank] = now

    def beat(self, rank: int, beat: Heartbeat, now: float) -> None:
        """A heartbeat came."""
        self._heard[rank] = now
        self._beats[rank] = (beat, now)

    def judge(self, now: float) -> Fault | None:
        """Whom the world has lost, if anybody; call it every `JUDGE_S`."""
        late = now - self._judged - JUDGE_S
        self._judged = now
        if late > OWN_PAUSE_S:  # we were paused ourselves: frames may be waiting to be read
            self._heard = dict.fromkeys(self._heard, now)
            self._awake = now
            return None
        return self._silent(now) or self._stuck(now)

    def _silent(self, now: float) -> Fault | None:
        rank = min(self._heard, key=lambda rank: (self._heard[rank], rank), default=-1)
        silence = now - self._heard.get(rank, now)
        if silence < self._patience.silent:
            return None
        error = EngineError(
            f"rank {rank} is silent",
            where=self._names[rank],
            found="; ".join(filter(None, (f"nothing for {silence:.1f} s", self._last(rank)))),
            expected=f"a heartbeat every {BEAT_S} s",
            hint="see whether its process is stopped, its node is up and its network is there",
        )
        return Fault(SILENT, error)

    def _stuck(self, now: float) -> Fault | None:
        """A loop at work without a sign, or ranks in a collective that no other rank is on its way to."""
        # All ranks may have been paused together with us, so nothing counts as older than our own last pause.
        ages = {rank: min(beat.age + now - came, now - self._awake) for rank, (beat, came) in self._beats.items()}
        phases = {rank: beat.phase for rank, (beat, _) in self._beats.items()}
        working = [rank for rank, phase in phases.items() if phase == "working"]
        if any(ages[rank] >= self._stalled for rank in working):
            return self._hung_at_work(ages, working)
        inside = [rank for rank, phase in phases.items() if phase == "collective"]
        if working or not inside or min(ages[rank] for rank in inside) < self._stalled:
            return None
        absent = [rank for rank in phases if rank not in inside and ages[rank] >= self._stalled]
        found = [f"rank {rank}: {self._last(rank)}" for rank in sorted(phases)]
        if absent:
            return self._hung(absent, found)
        if len(inside) < len(self._names):
            return None
        error = EngineError(
            "a collective does not end",
            where=", ".join(f"rank {rank}" for rank in sorted(inside)),
            found="; ".join(found),
            expected=f"an end within {self._stalled:.1f} s: every rank takes part in it",
            hint="check the network of the bus, which is not that of the journal",
        )
        return Fault(STALLED, error)

    def _hung_at_work(self, ages: Mapping[int, float], working: Sequence[int]) -> Fault:
        """Whom the loops that give no sign wait for: a rank that was told of a step and has not begun it, or else those
        of them that got least far. On a GPU a loop waits for its device, and so for the other ranks, at work."""
        steps = {rank: beat.step for rank, (beat, _) in self._beats.items()}
        absent = [
            rank
            for rank, (beat, _) in self._beats.items()
            if rank and beat.phase == "waiting" and beat.step < self._told and ages[rank] >= self._stalled
        ]
        silent = [rank for rank in working if ages[rank] >= self._stalled / 2]
        least = min(steps[rank] for rank in silent)
        found = [f"rank {rank}: no sign for {ages[rank]:.1f} s, {self._last(rank)}" for rank in sorted(silent + absent)]
        return self._hung(absent or [rank for rank in silent if steps[rank] == least], found)

    def _hung(self, ranks: Sequence[int], found: Sequence[str]) -> Fault:
        ranks = sorted(ranks)
        error = EngineError(
            ", ".join(f"rank {rank}" for rank in ranks) + (" hang" if len(ranks) > 1 else " hangs"),
            where=", ".join(self._names[rank] for rank in ranks),
            found="; ".join(found),
            expected=f"a sign of every loop within {self._stalled:.1f} s",
            hint="the stacks are in the fault files",
        )
        return Fault(STALLED, error)

    def _last(self, rank: int) -> str:
        if rank not in self._beats:
            return ""
        beat, _ = self._beats[rank]
        return f"last {beat.phase}, step {beat.step}" + (f", {beat.call}" if beat.call else "")


class Fate:
    """Which of several accounts ended the world. Those that come within a moment of the first are of one event; a
    process that ended is the cause, and silence was waited about long enough.

    Args:
        missed: seconds that a collective's failure waits for its cause; None is `Patience.settle`, as for any other.
    """

    def __init__(self, patience: Patience, missed: float | None = None) -> None:
        self._settle = patience.settle
        self._missed = patience.settle if missed is None else missed
        self._faults: list[Fault] = []
        self._due = float("inf")

    def note(self, fault: Fault, now: float) -> None:
        """An account came."""
        wait = {ENDED: 0.0, SILENT: 0.0, MISSED: self._missed}.get(fault.weight, self._settle)
        self._due = min(self._due, now + wait)
        self._faults.append(fault)

    def sealed(self, now: float) -> DgppError | None:
        """The account nearest to the cause, once no other has to be waited for."""
        if now < self._due:
            return None
        return min(self._faults, key=lambda fault: fault.weight).error
