"""A scheduler and a fake engine in one loop, with the invariants of every tick checked from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgpp_core.engine.operations import Begin, Prefill, StepResult
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Ending, Submit
from dgpp_core.scheduler.scheduler import Scheduler, TickInput, TickOutput
from dgpp_core.testing.fake_engine import Accept, FakeEngine, Pick, ViolationError, hashed_pick, solo


class SchedulerWorld:
    """Submissions in, replies out; every tick's inputs are recorded for a replay.

    Args:
        limits: what the scheduler may hand out.
        lag: ticks by which a result comes late, 0 or 1.
        pick: the next token; by default a hash of all ids so far.
        accept: how many drafts stand; by default none.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        lag: int = 0,
        pick: Pick | None = None,
        accept: Accept = lambda request, position: 0,
    ) -> None:
        self.limits = limits
        self.pick = pick or hashed_pick(1000)
        self.scheduler = Scheduler(limits)
        self.engine = FakeEngine(limits, lag=lag, pick=self.pick, accept=accept)
        self.submits: dict[int, Submit] = {}
        self.replies: dict[int, list[int]] = {}
        self.endings: dict[int, Ending] = {}
        self.inputs: list[TickInput] = []
        self.outputs: list[TickOutput] = []
        self._submissions: list[Submit] = []
        self._cancels: list[int] = []
        self._stops: list[int] = []
        self._results: tuple[StepResult, ...] = ()
        self._waiting: set[int] = set()

    def submit(self, tokens: Sequence[int], max_tokens: int = 4, **fields: Any) -> int:
        """Put a greedy request into the next tick; returns its id. ``fields`` are those of `Submit`."""
        name = len(self.submits)
        fields = {"params": GREEDY} | fields
        self.submits[name] = Submit(id=name, tokens=tuple(tokens), max_tokens=max_tokens, **fields)
        self._submissions.append(self.submits[name])
        self.replies[name] = []
        return name

    def cancel(self, *names: int) -> None:
        """Cancel requests in the next tick."""
        self._cancels.extend(names)

    def stop(self, *names: int) -> None:
        """Stop requests in the next tick."""
        self._stops.extend(names)

    def tick(self) -> TickOutput:
        """One tick of scheduler and engine.

        Raises:
            ViolationError: an operation or an invariant does not hold.
        """
        inputs = TickInput(tuple(self._submissions), tuple(self._cancels), tuple(self._stops), self._results)
        pending = bool(self._submissions) or not self.scheduler.idle
        due = self.engine.results_due or bool(self._results)
        self._submissions, self._cancels, self._stops = [], [], []
        self.inputs.append(inputs)
        output = self.scheduler.tick(inputs)
        self.outputs.append(output)
        self._deliver(inputs, output)
        self._results = self.engine.execute(output.tick, output.operations)
        _require(bool(output.operations or output.endings or due or not pending), "a tick with work makes progress")
        self._audit(output)
        return output

    def run(self, ticks: int = 10_000) -> None:
        """Tick until nothing is left to do.

        Raises:
            ViolationError: it takes more than ``ticks`` ticks.
        """
        for _ in range(ticks):
            if self.scheduler.idle and not self._submissions:
                return
            self.tick()
        raise ViolationError(f"not idle after {ticks} ticks")

    def verify(self) -> None:
        """Every request ended once, with the reply it gets when it is alone (a prefix of it where it was cut short)."""
        _require(self.endings.keys() == self.submits.keys(), "every request ended")
        for name, submit in self.submits.items():
            reason, reply = self.endings[name].reason, tuple(self.replies[name])
            if reason == "error":
                _require(not reply, f"refused request {name} has no reply")
                continue
            text, end = solo(submit, self.pick)
            if reason in ("cancelled", "stop"):
                text, end = text[: len(reply)], reason
            _require((reply, reason) == (text, end), f"request {name} is answered as it is alone")
        stats = self.scheduler.stats()
        _require(stats.blocks_in_use == stats.blocks_cached, "only the prefix cache holds blocks")
        _require(not self.engine.slots_held, "no slot is held")

    def _deliver(self, inputs: TickInput, output: TickOutput) -> None:
        for update in output.updates:
            _require(update.id not in self.endings, f"request {update.id} says nothing after its end")
            _require(len(update.tokens) > 0, "an update brings tokens")
            self.replies[update.id].extend(update.tokens)
        for ending in output.endings:
            _require(ending.id not in self.endings, f"request {ending.id} ends once")
            self.endings[ending.id] = ending
        self._waiting.update(submit.id for submit in inputs.submissions)
        self._waiting.difference_update(ending.id for ending in output.endings)
        self._waiting.difference_update(each.request for each in output.operations if isinstance(each, Begin))

    def _audit(self, output: TickOutput) -> None:
        stats, held = self.scheduler.stats(), self.engine.slots_held
        _require(
            len(self.engine.blocks_held) + stats.blocks_cached == stats.blocks_in_use, "every block is accounted for"
        )
        _require(stats.active + stats.prefilling == len(held), "the slots held are those of running requests")
        _require(not self.endings.keys() & set(held.values()), "no slot is held by a request that ended")
        _require(len(set(held.values())) == len(held), "no request holds two slots")
        _require(len(self._waiting) <= self.limits.slots + self.limits.queue, "the queue is bounded")
        _require(stats.snapshots_in_use <= stats.snapshots_total, "the arena is bounded")
        computed = sum(each.count for each in output.operations if isinstance(each, Prefill))
        budget = max(self.limits.prefill_budget, self.limits.prefill_idle_budget)
        _require(computed <= budget or not self.limits.prefill_budget, "prefill keeps to its budget")


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise ViolationError(f"broken promise: {promise}")
