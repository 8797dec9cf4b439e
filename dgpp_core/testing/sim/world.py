"""One simulated world, from its start to its end, and whether everything held that must hold."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from functools import partial

import msgspec

from dgpp_core.cluster.records import FromFollower, FromLeader, Hello, from_follower, from_leader
from dgpp_core.testing.fake_engine import hashed_pick
from dgpp_core.testing.fake_world import BUILD, hello
from dgpp_core.testing.sim.device import Countdown, Fabric, SimEngine
from dgpp_core.testing.sim.front import FrontProcess
from dgpp_core.testing.sim.lead import LeadProcess
from dgpp_core.testing.sim.member import MemberProcess, other_terms
from dgpp_core.testing.sim.process import Process
from dgpp_core.testing.sim.promises import require
from dgpp_core.testing.sim.rank import PATIENCE, RankProcess
from dgpp_core.testing.sim.scenario import AT_THE_START, BORNE, ON_A_LINK, VOCAB, Scenario, Trouble
from dgpp_core.testing.sim.timeline import Timeline
from dgpp_core.testing.sim.wire import Wire

FOUND_S = 2.5
"""Seconds within which clients know of a fault while the world serves."""
LOADING_S = 62.0
"""The same before, of a rank that says nothing."""
REAP_S = 3.5
"""Seconds after which the front end of a failed world ends what is left of it on its host."""
GONE_S = 2.5
"""Seconds after that within which every process has ended."""
LONGEST_S = 240.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a scenario.

    Attributes:
        troubles: kinds of what went wrong.
        struck: one of them changed something.
        failure: what clients were told where the world failed.
        found_s: seconds from the one to the other, if it was while the world served; otherwise 0.
        virtual_s: seconds that the world ran for.
        digest: of everything that happened.
        steps: of rank 0.
        answered: requests that were.
        hits, preempted, evicted: of rank 0's scheduler.
    """

    seed: int
    world: int
    troubles: tuple[str, ...]
    struck: bool
    failure: str
    found_s: float
    virtual_s: float
    digest: str
    steps: int
    answered: int
    hits: int
    preempted: int
    evicted: int


class SimWorld:
    """A scenario's processes.

    Raises:
        BrokenPromiseError: by any method, something that must hold does not.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.timeline = scenario, Timeline()
        self._random = random.Random(f"{scenario.seed} threads")
        self._pick = hashed_pick(VOCAB)
        self.fabric = Fabric(self.timeline, self._source(), scenario.world, notices=scenario.notices)
        self.front = FrontProcess(scenario, self.timeline, self._source())
        self.lead = LeadProcess(
            scenario, self.timeline, self._source(), self.fabric, self._engine(), self.front, self.front.receive
        )  # fmt: skip
        self.front.connect(self.lead, self.lead.channel.put)
        self.members = {rank: self._member(self._hello(rank)) for rank in range(1, scenario.world)}
        self.strangers: list[MemberProcess] = []
        self.struck_at = -1.0
        self._struck_while_loading = self._late = False
        if any(each.kind in AT_THE_START for each in scenario.troubles):
            self._strike()

    def run(self) -> Run:
        """From the start to the end."""
        self.lead.start(self.front.ready)
        for member in self.members.values():
            self.timeline.after(self._random.uniform(0, 0.2), partial(self._connect, member))
        for trouble in self.scenario.troubles:
            self.timeline.after(trouble.at, partial(self._begin, trouble))
        while not self._over():
            require(
                self.timeline.now < LONGEST_S and self.timeline.step(), "the world ends, or says why it cannot go on"
            )
        if self.front.failure:
            self._reap()
        self._verify()
        return self._account()

    def _over(self) -> bool:
        """A rank that is stopped when it has said goodbye is for whoever started it to end."""
        staying = any(each.alive and not each.paused for each in self.members.values())
        return bool(self.front.failure) or (self.lead.settled and not staying)

    def _reap(self) -> None:
        """The front end ends what is left here; what a launcher ended elsewhere goes on, and then ends by itself."""
        failed = self.timeline.now
        self._until(failed + REAP_S)
        if self.lead.alive:
            self.lead.leave()
        for member in self.members.values():
            if member.paused:
                member.resume()
        self._until(failed + REAP_S + GONE_S)
        left = [f"rank {each.rank}" for each in self.members.values() if each.alive]
        require(not left, f"every process ends when the world has failed, not so {', '.join(left)}")

    def _until(self, end: float) -> None:
        while self.timeline.now < end and self.timeline.step():
            pass

    def _verify(self) -> None:
        """What a run must have come to."""
        self.front.verify(self._pick, trusted=True)
        require(not any(stranger.joined for stranger in self.strangers), "a stranger is not taken in")
        fatal = [each for each in self.scenario.troubles if each.kind not in BORNE]
        if not self.front.failure:
            require(self.struck_at < 0 or self._late, f"{fatal and fatal[0].kind} ends the world by name")
            heads = {each.stream.head for each in self.members.values()} | {self.lead.stream.head}
            require(len(heads) == 1, "all ranks end with one operation stream")
            return
        require(self.struck_at >= 0, f"nobody is blamed for nothing: {self.front.failure}")
        limit = LOADING_S if self._struck_while_loading else FOUND_S + PATIENCE.leave * self.lead.finishing
        took = self.front.failed_at - self.struck_at
        require(took <= limit, f"a fault is known within {limit} s, not {took:.2f} s")
        self._require_named(fatal[0].rank)

    def _require_named(self, rank: int) -> None:
        error = self.lead.failure
        if error is None or self.scenario.world == 1:
            require(rank == 0, f"rank {rank} is named: {self.front.failure}")
            return
        named = re.findall(r"rank (\d+)", error.what) or re.findall(r"rank (\d+)", error.where)
        require(set(map(int, named)) == {rank}, f"rank {rank} is named, and no other: {error.line()}")

    def _account(self) -> Run:
        serving = self.lead.serving and not self._struck_while_loading and not self.lead.finishing
        stats, replies = self.lead.loop.beat().stats, self.front.replies
        told = [(each.submit.id, tuple(each.tokens), str(each.ends)) for each in replies]
        said = repr((told, self.lead.stream.head, self.front.failure, round(self.timeline.now, 9)))
        return Run(
            seed=self.scenario.seed,
            world=self.scenario.world,
            troubles=tuple(each.kind for each in self.scenario.troubles),
            struck=self.struck_at >= 0,
            failure=self.front.failure,
            found_s=self.front.failed_at - self.struck_at if serving and self.front.failure else 0.0,
            virtual_s=self.timeline.now,
            digest=hashlib.blake2b(said.encode(), digest_size=8).hexdigest(),
            steps=self.lead.stream.number,
            answered=sum(bool(each.ends) for each in replies),
            hits=stats.cache_hits,
            preempted=stats.requests_preempted,
            evicted=stats.cache_evictions,
        )

    def _source(self) -> random.Random:
        return random.Random(self._random.getrandbits(64))

    def _engine(self) -> SimEngine:
        limits, seed = self.scenario.limits, self.scenario.seed
        return SimEngine(
            limits,
            pick=self._pick,
            vocab=VOCAB,
            accept=lambda request, position: (request * 7 + position * 13 + seed) % (limits.depth + 1),
            struck=self._strike,
        )

    def _hello(self, rank: int) -> Hello:
        other = any(each.kind == "build" and each.rank == rank for each in self.scenario.troubles)
        build = msgspec.structs.replace(BUILD, version="another") if other else BUILD
        return hello(rank, self.scenario.world, build=build)

    def _member(self, saying: Hello, fabric: Fabric | None = None) -> MemberProcess:
        other = any(each.kind == "terms" and each.rank == saying.rank for each in self.scenario.troubles)
        terms = {"terms": other_terms()} if other else {}
        return MemberProcess(
            saying, self.scenario, self.timeline, self._source(), fabric or self.fabric, self._engine(), **terms
        )

    def _connect(self, member: MemberProcess) -> None:
        """A connection of the journal, both ways."""
        taken = [False]

        def hear(record: FromFollower) -> None:
            if taken[0]:
                self.lead.hear(member.rank, record)
            elif isinstance(record, Hello):
                self.lead.admit(record, outward)
                taken[0] = self.lead.wires.get(member.rank) is outward

        def broken(found: str) -> None:
            if taken[0]:
                self.lead.lost(member.rank, found)

        latency = self.scenario.latency
        outward = Wire(from_leader, "rank 0", member, latency, hear=member.hear, broken=member.lost)
        inward = Wire(from_follower, f"rank {member.rank}", self.lead, latency, hear=hear, broken=broken)
        if not self.lead.alive:
            return member.lost("connection refused")
        self.lead.accept(outward)
        return member.join(inward)

    def _strike(self) -> None:
        """The trouble has changed something; in the world's last moments it may come too late to be noticed."""
        self._late = self._late or self.lead.finishing
        if self.struck_at < 0:
            self.struck_at = self.timeline.now
            self._struck_while_loading = not self.lead.serving

    def _begin(self, trouble: Trouble) -> None:
        """Make trouble; later, if what it is about is not there yet."""
        process: RankProcess = self.members[trouble.rank] if trouble.rank else self.lead
        if self._early(trouble):
            if process.alive and self.lead.alive and not self.front.failure:
                self.timeline.after(0.02, lambda: self._begin(trouble))
            return
        if not process.alive or not self.lead.alive:
            return
        match trouble.kind:
            case "delay":
                for wire in self._wires(trouble.rank):
                    wire.until = self.timeline.now + trouble.amount
            case "pause":
                self._pause([process], trouble.amount)
            case "freeze":
                self._pause([self.front, self.lead, *self.members.values()], trouble.amount)
            case "leap":
                process.clock.leap(trouble.amount)
            case "slow step":
                process.slow = trouble.amount
            case "old epoch":
                self._stranger(hello(trouble.rank, self.scenario.world, epoch=0))
            case "second of a rank":
                self._stranger(hello(trouble.rank, self.scenario.world))
            case "raise":
                process.engine.raises = Countdown(int(trouble.amount))
            case "result":
                process.engine.flips = Countdown(int(trouble.amount))
            case "snapshot":
                process.engine.tears = Countdown(int(trouble.amount))
            case "hang":
                process.hung, process.on_hang = True, self._strike
            case "stop":
                self._strike()
                process.pause()
            case "crash":
                self._strike()
                process.leave()
                if process is self.lead:
                    self.front.at("loop", 0.01, lambda: self.front.broken("the engine process was killed"))
            case "flip" | "drop" | "double" | "swap" | "cut":
                self._damage(trouble)

    def _early(self, trouble: Trouble) -> bool:
        """Whether what the trouble is about is not there yet."""
        if trouble.kind == "stop" and trouble.rank == 0:
            return not self.lead.serving  # nobody watches the start of an engine but who started it
        on_a_link = trouble.kind in (*ON_A_LINK, "delay", "second of a rank")
        return on_a_link and not self.members[trouble.rank].joined

    def _wires(self, rank: int) -> tuple[Wire[FromLeader], Wire[FromFollower]]:
        inward = self.members[rank].wire
        assert inward is not None
        return self.lead.wires[rank], inward

    def _damage(self, trouble: Trouble) -> None:
        outward, inward = self._wires(trouble.rank)
        if trouble.outward or trouble.kind == "cut":
            outward.arm(trouble.kind, self._strike)  # type: ignore[arg-type]
        if not trouble.outward:
            inward.arm(trouble.kind, self._strike)  # type: ignore[arg-type]

    def _pause(self, processes: Sequence[Process], seconds: float) -> None:
        for process in processes:
            process.pause()
            self.timeline.after(seconds, process.resume)

    def _stranger(self, saying: Hello) -> None:
        fabric = Fabric(self.timeline, self._source(), self.scenario.world, notices=False)
        self.strangers.append(self._member(saying, fabric))
        self._connect(self.strangers[-1])
