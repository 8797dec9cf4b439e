"""Several ranks in one process, each with its own engine and scheduler, held to the same bits every tick."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from dgpp_core.api import EngineError
from dgpp_core.bus.loopback import DEADLINE, LoopbackBus, LoopbackWorld
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import build_engine, prepare
from dgpp_core.engine.operations import Operation, StepResult
from dgpp_core.host.loading import LoadedModel
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Submit
from dgpp_core.scheduler.scheduler import Scheduler, TickOutput
from dgpp_core.scheduler.sizing import limits_from
from dgpp_core.scheduler.stepper import Pending, Stepper
from dgpp_core.testing.world import World


class Account(msgspec.Struct, frozen=True):
    """What one rank says about a tick.

    Attributes:
        digest: of every operation so far.
        operations: those of this tick.
        results: the results read in this tick, encoded: equal bytes are equal bits, of log-probabilities too.
    """

    digest: int
    operations: tuple[Operation, ...]
    results: tuple[bytes, ...]


class _Read:
    """A launched tick that notes its result for the rank's account when it is read."""

    def __init__(self, pending: Pending, notes: list[bytes]) -> None:
        self._pending, self._notes = pending, notes

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._notes.append(msgspec.msgpack.encode(result))
        return result


class _Rank:
    """One rank's scheduler and engine; implements `Executor` around the engine."""

    def __init__(self, engine: Engine, limits: Limits, lag: int) -> None:
        self.engine, self.delivered = engine, list[TickOutput]()
        self.stepper = Stepper(Scheduler(limits), self, lag=lag, deliver=self.delivered.append)
        self._notes: list[bytes] = []

    def launch(self, tick: int, operations: Sequence[Operation]) -> Pending:
        return _Read(self.engine.launch(tick, operations), self._notes)

    def tick(self, arrivals: Sequence[Submit], cancels: Sequence[int], stops: Sequence[int]) -> Account:
        self._notes.clear()
        self.delivered.clear()
        operations = self.stepper.step(arrivals, cancels, stops)
        return Account(self.stepper.scheduler.digest, operations, tuple(self._notes))


class TensorParallelWorld(World):
    """Ranks that share a model, as threads of this process, driven like a `World`.

    Every tick all ranks are given the same arrivals, plan by themselves and compute their parts. Operations, their
    digests and results are then compared.

    Args:
        loopback: where the engines' buses meet.
        engines: one a rank, in order of rank, each built with its bus of ``loopback``.

    Attributes:
        engine, scheduler, stepper: those of rank 0.
    """

    def __init__(self, loopback: LoopbackWorld, engines: Sequence[Engine], limits: Limits, *, lag: int = 0) -> None:
        super().__init__(engines[0], limits, lag=lag)
        self.loopback = loopback
        self.ranks = tuple(_Rank(engine, limits, lag) for engine in engines)
        self.stepper = self.ranks[0].stepper
        self.scheduler = self.stepper.scheduler

    @classmethod
    def load(
        cls,
        model: LoadedModel,
        folder: Path,
        settings: EngineSettings,
        world: int,
        *,
        lag: int = 0,
        device: str = "cpu",
        deadline: float = DEADLINE,
    ) -> TensorParallelWorld:
        """Load a checkpoint folder on every rank, each its own part. On a CUDA device all ranks share that one.

        Args:
            deadline: seconds that a rank waits for the others in a collective.

        Raises:
            DgppError: as `prepare` and `build_engine`.
        """
        prepared = prepare(model, folder, settings, "cpu" if device == "cpu" else "cuda", world=world)
        loopback = LoopbackWorld(world, deadline=deadline)

        def build(bus: LoopbackBus) -> Engine:
            return build_engine(prepared, torch.device(device), lambda stage, done, total: None, bus)

        engines = loopback.run(build)
        limits = limits_from(
            prepared.geometry,
            settings,
            engines[0].needs_snapshot,
            decode_rows_match_prefill=engines[0].decode_rows_match_prefill,
            confident=engines[0].confident,
        )
        return cls(loopback, engines, limits, lag=lag)

    def tick(self, cancels: Sequence[int] = (), stops: Sequence[int] = ()) -> None:
        """Plan and execute one tick on every rank.

        Raises:
            EngineError: the ranks planned or computed something else; or what the first rank to fail raised.
        """
        arrivals, self._arrivals = self._arrivals, []
        accounts = self.loopback.run(lambda bus: self.ranks[bus.rank].tick(arrivals, cancels, stops))
        _require_same(accounts)
        for output in self.ranks[0].delivered:
            self._deliver(output)


def _require_same(accounts: Sequence[Account]) -> None:
    for rank, account in enumerate(accounts):
        for field in Account.__struct_fields__:
            found, expected = getattr(account, field), getattr(accounts[0], field)
            if found != expected:
                raise EngineError(
                    f"the ranks disagree about a tick's {field}",
                    where=f"rank {rank} of {len(accounts)}",
                    found=str(found),
                    expected=f"{expected}, as rank 0 has it",
                )
