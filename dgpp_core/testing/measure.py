"""Measuring an engine in this process: decode, prefill and cached prefill, each beside its floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec
import torch

from dgpp_core.testing.world import World


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding at a number of streams.

    Attributes:
        ms_per_step: median.
        bytes: what a step must read: weights once, and each stream's keys and values.
        floor_ms: that at the measured read bandwidth.
        share: floor over achieved.
    """

    streams: int
    ms_per_step: float
    tokens_per_second: float
    bytes: int
    floor_ms: float
    share: float


class PrefillTime(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds to the first token, cold and with the prefix cached."""

    tokens: int
    cold_ms: float
    cached_ms: float
    cached_tokens: int


def read_bandwidth(clock: Callable[[], float], device: torch.device, size: int = 1 << 29) -> float:
    """Bytes a second of a sum over ``size`` bytes; the best of five."""
    data = torch.ones(size // 4, device=device)
    times = []
    for _ in range(5):
        start = clock()
        data.sum().item()
        times.append(clock() - start)
    return size / min(times)


def measure_decode(
    world: World,
    clock: Callable[[], float],
    *,
    streams: int,
    prompt: int,
    steps: int,
    weight_bytes: int,
    bandwidth: float,
) -> Decode:
    """Median time of a step with ``streams`` requests running, past their prefill."""
    vocab = world.engine.vocab_size
    for number in range(streams):
        tokens = [(7 + 31 * i + 977 * number) % vocab for i in range(prompt)]
        world.submit(tokens, steps + 8, use_cache=False)
    while world.scheduler.stats().active < streams or world.scheduler.stats().prefilling:
        world.tick()
    times = []
    for _ in range(steps):
        start = clock()
        world.tick()
        times.append(clock() - start)
    world.run()
    seconds = statistics.median(times)
    rows = prompt + steps // 2
    need = weight_bytes + streams * rows * world.engine.state.bytes_per_token
    return Decode(
        streams=streams,
        ms_per_step=seconds * 1e3,
        tokens_per_second=streams / seconds,
        bytes=need,
        floor_ms=need / bandwidth * 1e3,
        share=need / bandwidth / seconds,
    )


def measure_prefill(world: World, clock: Callable[[], float], tokens: Sequence[int]) -> PrefillTime:
    """Time to the first token of a prompt, twice: the second time its prefix is cached."""
    times, cached = [], 0
    for _ in range(2):
        start = clock()
        reply = world.reply(tokens, 1)
        times.append((clock() - start) * 1e3)
        cached = reply.cached
    return PrefillTime(tokens=len(tokens), cold_ms=times[0], cached_ms=times[1], cached_tokens=cached)
