"""Measuring an engine in this process: decode, prefill and cached prefill, each beside its floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec
import torch

from dgpp_core.api import ConfigError
from dgpp_core.engine.graphs import StaticRunner
from dgpp_core.testing.subject import without_graphs
from dgpp_core.testing.traffic import Read, mean_chosen, read_bytes, recorded_reads
from dgpp_core.testing.world import World

Clock = Callable[[], float]
"""Seconds, monotonic."""

WARM_STEPS = 6
TICKS_TO_START = 10_000


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding at a number of streams; medians of the runs.

    Attributes:
        context: tokens of a stream, on average over the steps measured.
        bytes: what a step must read: the weights of its products, of experts those chosen, and keys and values.
        experts: routed experts that a layer's rows chose, on average; 0 where there are none.
        floor_ms: that at the measured read bandwidth.
        share: floor over achieved.
        host_ms: of a step, time in which the device had none of its work, from steps that are not among the runs; None
            where decoding runs without graphs.
        tokens_per_step: committed by one stream.
        runs_ms: milliseconds a step of each run.
    """

    streams: int
    context: int
    ms_per_step: float
    tokens_per_second: float
    bytes: int
    experts: float
    floor_ms: float
    share: float
    host_ms: float | None
    tokens_per_step: float
    runs_ms: tuple[float, ...]


class PrefillTime(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds to the first token, cold (the median of the runs) and with the prefix cached.

    ``launch_ms`` of each is the host's part: until the first chunk of the prompt is handed to the device.
    """

    tokens: int
    ms: float
    launch_ms: float
    cached_ms: float
    cached_launch_ms: float
    cached_tokens: int
    ratio: float
    runs_ms: tuple[float, ...]


def read_bandwidth(clock: Clock, device: torch.device, size: int = 0) -> float:
    """Bytes a second of a sum over ``size`` bytes (2 GiB on a GPU, else 512 MiB): the best of several."""
    data = torch.ones((size or (1 << 31 if device.type == "cuda" else 1 << 29)) // 4, device=device)
    times = []
    for _ in range(8):
        _synchronise(device)
        start = clock()
        data.sum()
        _synchronise(device)
        times.append(clock() - start)
    return data.numel() * 4 / min(times)


class StepClock:
    """Device time around each step of a `StaticRunner`; attach it as the runner's mark."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def __call__(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def idle_ms(self) -> float:
        """Milliseconds between the end of a step and the begin of the next, a step; forgets what it has seen."""
        marks, self._marks = self._marks, []
        torch.cuda.synchronize()
        gaps = [end.elapsed_time(begin) for end, begin in zip(marks[1::2], marks[2::2], strict=False)]
        return float(sum(gaps)) / max(1, len(gaps))


def prompt_of(world: World, length: int, number: int) -> list[int]:
    """A prompt of its own for each number."""
    source = torch.Generator().manual_seed(number)
    return torch.randint(world.engine.vocab_size, (length,), generator=source).tolist()


def most_generated(steps: int, runs: int, depth: int) -> int:
    """Tokens that `measure_decode` asks for a stream: of the runs, of the steps around them and of those in flight."""
    return (depth + 1) * ((runs + 1) * steps + 2 * WARM_STEPS + 4)


def measure_decode(
    world: World, clock: Clock, *, streams: int, context: int, steps: int, runs: int, bandwidth: float
) -> Decode:
    """Time of a step with ``streams`` requests running, past their prefill.

    Args:
        context: tokens of a stream in the middle of the measurement; its prompt is shorter by half of the steps.
        steps, runs: ``runs`` times ``steps`` steps are timed; on a GPU as many as a run more give `Decode.host_ms`.

    Raises:
        ConfigError: the engine cannot serve what is measured.
    """
    engine, most = world.engine, most_generated(steps, runs, world.engine.depth)
    prompt = max(1, context - (runs * steps + WARM_STEPS) // 2)
    requests = [world.submit(prompt_of(world, prompt, number), most, use_cache=False) for number in range(streams)]
    for _ in range(TICKS_TO_START):
        if world.scheduler.stats().active == streams and not world.scheduler.stats().prefilling:
            break
        world.tick()
        _require(world, requests, "")
    else:
        raise _unserved(f"{world.scheduler.stats().active} of {streams} streams run: the pool is too small")
    for _ in range(WARM_STEPS):
        world.tick()
    reads = _reads_of_a_step(world)
    before = sum(len(world.replies[request].tokens) for request in requests)
    times = [_run(world, clock, steps) for _ in range(runs)]
    committed = sum(len(world.replies[request].tokens) for request in requests) - before
    host_ms = _host_ms(world, clock, steps)
    _require(world, requests, "")
    world.tick(cancels=requests)
    world.run()
    seconds = statistics.median(times)
    rows = prompt + (runs * steps + WARM_STEPS) * committed // (2 * streams * runs * steps)
    need = read_bytes(reads) + streams * rows * engine.state.bytes_per_token
    return Decode(
        streams=streams,
        context=rows,
        ms_per_step=seconds * 1e3,
        tokens_per_second=committed / (runs * steps) / seconds,
        bytes=need,
        experts=mean_chosen(reads),
        floor_ms=need / bandwidth * 1e3,
        share=need / bandwidth / seconds,
        host_ms=host_ms,
        tokens_per_step=committed / (runs * steps * streams),
        runs_ms=tuple(time * 1e3 for time in times),
    )


def measure_prefill(world: World, clock: Clock, *, tokens: int, runs: int) -> PrefillTime:
    """Time to the first token of prompts that nobody has sent before, and of one whose prefix is cached.

    Raises:
        ConfigError: the engine cannot serve such a prompt.
    """
    _time_to_first(world, clock, prompt_of(world, tokens, 0))
    cold = [_time_to_first(world, clock, prompt_of(world, tokens, 1 + run)) for run in range(runs)]
    warm = [_time_to_first(world, clock, prompt_of(world, tokens, runs)) for _ in range(runs)]
    ms, cached_ms = (statistics.median(each.ms for each in times) for times in (cold, warm))
    return PrefillTime(
        tokens=tokens,
        ms=ms,
        launch_ms=statistics.median(each.launch_ms for each in cold),
        cached_ms=cached_ms,
        cached_launch_ms=statistics.median(each.launch_ms for each in warm),
        cached_tokens=warm[0].cached,
        ratio=cached_ms / ms,
        runs_ms=tuple(each.ms for each in cold),
    )


def _run(world: World, clock: Clock, steps: int) -> float:
    """Seconds a step."""
    device = world.engine.device
    _synchronise(device)
    start = clock()
    for _ in range(steps):
        world.tick()
    _synchronise(device)
    return (clock() - start) / steps


class _First(msgspec.Struct, frozen=True):
    """Milliseconds to the first token and to the end of the first tick, and how many tokens were cached."""

    ms: float
    launch_ms: float
    cached: int


def _time_to_first(world: World, clock: Clock, prompt: Sequence[int]) -> _First:
    _synchronise(world.engine.device)
    start = clock()
    request = world.submit(prompt, 1)
    world.tick()
    launched = clock()
    world.run()
    ended = clock()
    _require(world, [request], "length")
    return _First((ended - start) * 1e3, (launched - start) * 1e3, world.replies[request].cached)


def _require(world: World, requests: Sequence[int], reason: str) -> None:
    """Refuse to measure requests that have not ended for ``reason``; where it is empty, that have ended."""
    for request in requests:
        if (reply := world.replies[request]).reason != reason:
            raise _unserved(reply.error or f"a request ended: {reply.reason}")


def _unserved(found: str) -> ConfigError:
    what, hint = "the engine does not serve what is to be measured", "measure fewer tokens, steps or runs"
    return ConfigError(what, where="the benchmark", found=found, hint=hint)


def _reads_of_a_step(world: World) -> list[Read]:
    """The calls of one tick, run without graphs."""
    with without_graphs(world.engine), recorded_reads() as reads:
        world.tick()
    return reads


def _host_ms(world: World, clock: Clock, steps: int) -> float | None:
    """`Decode.host_ms`, from steps of their own: marking a step's ends takes time of the device."""
    runner = world.engine.runner
    if not isinstance(runner, StaticRunner) or world.engine.device.type != "cuda":
        return None
    runner.mark = marks = StepClock()
    try:
        _run(world, clock, steps)
    finally:
        runner.mark = None
    return marks.idle_ms()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
