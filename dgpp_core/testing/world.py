"""Scheduler and engine in one process, without sockets or threads: what tests and benchmarks drive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from dgpp_core.api import Bus
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import build_engine, prepare
from dgpp_core.engine.operations import TokenLogprobs
from dgpp_core.host.loading import LoadedModel
from dgpp_core.images.picture import Picture
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Submit
from dgpp_core.scheduler.scheduler import Scheduler, TickOutput
from dgpp_core.scheduler.sizing import limits_from, step_depths
from dgpp_core.scheduler.stepper import Stepper
from dgpp_core.text.grammar.spec import Grammar


class Reply(msgspec.Struct):
    """What a request got.

    Attributes:
        tokens: generated ids, the one that ended it included.
        reason: why it ended; empty while it runs.
        cached: prompt tokens taken from the prefix cache.
        updates: how many tokens came in each update.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    reason: str = ""
    cached: int = 0
    error: str = ""
    updates: list[int] = []


class World:
    """One engine and its scheduler.

    Args:
        lag: 1 feeds each step's result one tick late, as a pipelined engine does.
    """

    def __init__(self, engine: Engine, limits: Limits, *, lag: int = 0) -> None:
        self.engine, self.scheduler = engine, Scheduler(limits)
        self.stepper = Stepper(self.scheduler, engine, lag=lag, deliver=self._deliver, look=engine.look)
        self.replies: dict[int, Reply] = {}
        self._arrivals: list[Submit] = []

    @classmethod
    def from_checkpoint(
        cls,
        model: LoadedModel,
        folder: Path,
        settings: EngineSettings,
        *,
        lag: int = 0,
        device: str = "cpu",
        static: bool | None = None,
        bus: Bus | None = None,
    ) -> World:
        """Load a checkpoint folder as the engine process does.

        Args:
            bus: this process's way to the other ranks, each of which drives a world of its own in the same way.
            static: whether decode steps run from static buffers, captured on CUDA; by default there, if the settings
                say so.
        """
        ranks = bus.world if bus else 1
        settings = settings.on_device(gpu=device != "cpu")
        prepared = prepare(model, folder, settings, "cpu" if device == "cpu" else "cuda", world=ranks)
        engine = build_engine(prepared, torch.device(device), lambda stage, done, total: None, bus)
        capturable = device != "cpu" and (bus is None or bus.capturable)
        if (capturable and settings.decode_graph) if static is None else static:
            for _ in engine.use_graphs(step_depths(prepared.geometry, settings)):
                pass
        limits = limits_from(
            prepared.geometry,
            settings,
            engine.needs_snapshot,
            decode_rows_match_prefill=engine.decode_rows_match_prefill,
            confident=engine.confident,
        )
        return cls(engine, limits, lag=lag)

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        params: SamplingParams = GREEDY,
        logprobs: int = -1,
        eos_ids: tuple[int, ...] = (),
        use_cache: bool = True,
        grammar: Grammar | None = None,
        pictures: Sequence[Picture] = (),
    ) -> int:
        """Hand in a request for the next tick; returns its id."""
        request = len(self.replies)
        self.replies[request] = Reply([], [])
        self._arrivals.append(
            Submit(
                id=request,
                tokens=tuple(tokens),
                max_tokens=max_tokens,
                params=params,
                logprobs=logprobs,
                eos_ids=eos_ids,
                use_cache=use_cache,
                grammar=grammar,
                pictures=tuple(pictures),
            )
        )
        return request

    def tick(self, cancels: Sequence[int] = (), stops: Sequence[int] = ()) -> None:
        """Plan and execute one tick."""
        arrivals, self._arrivals = self._arrivals, []
        self.stepper.step(arrivals, cancels, stops)

    def _deliver(self, out: TickOutput) -> None:
        for update in out.updates:
            reply = self.replies[update.id]
            reply.tokens += update.tokens
            reply.logprobs += update.logprobs or ()
            reply.updates.append(len(update.tokens))
        for ending in out.endings:
            reply = self.replies[ending.id]
            reply.reason, reply.cached, reply.error = ending.reason, ending.cached_tokens, ending.error

    def run(self, limit: int = 100_000) -> dict[int, Reply]:
        """Tick until nothing is left; all replies so far.

        Raises:
            RuntimeError: after ``limit`` ticks.
        """
        for _ in range(limit):
            if self.stepper.idle and not self._arrivals:
                return self.replies
            self.tick()
        raise RuntimeError(f"work is left after {limit} ticks")

    def reply(
        self, tokens: Sequence[int], max_tokens: int, *, params: SamplingParams = GREEDY, logprobs: int = -1
    ) -> Reply:
        """The reply to one request, run to its end with whatever else is waiting."""
        request = self.submit(tokens, max_tokens, params=params, logprobs=logprobs)
        return self.run()[request]
