"""How long choices take, from what goes to the engine and what comes back. The clock is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Histogram

from dgpp_core.scheduler.messages import Beat, FromEngine, Output, Submit, ToEngine

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DECODE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _Choice(msgspec.Struct):
    """A choice in the engine: seconds of its submission, its first and its last tokens."""

    submitted: float
    first: float = 0.0
    last: float = 0.0


class Mean(msgspec.Struct):
    """A sum of seconds and how many there were."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.seconds += seconds

    @property
    def ms(self) -> float:
        """The mean in milliseconds, 0 of none."""
        return round(self.seconds * 1e3 / self.count, 3) if self.count else 0.0


class Timings:
    """Follows every choice from its submission to its end.

    Attributes:
        registry: the histograms.
        hits, misses: time to the first token of choices that found a prefix in the cache, and of those that did not.
    """

    def __init__(self, clock: Callable[[], float], model: str) -> None:
        self._clock = clock
        self._choices: dict[int, _Choice] = {}
        self._beat = clock()
        self.registry = CollectorRegistry()
        self.hits, self.misses = Mean(), Mean()

        def histogram(name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, about, ("model_name", *labels), buckets=buckets, registry=self.registry)

        first = histogram(
            "dgpp_time_to_first_token_seconds", "From submission to the first token.", TTFT_BUCKETS, "prefix_cache"
        )
        self._first_hit = first.labels(model_name=model, prefix_cache="hit")
        self._first_miss = first.labels(model_name=model, prefix_cache="miss")
        self._gap = histogram(
            "dgpp_inter_token_latency_seconds", "Between steps that gave a choice tokens.", GAP_BUCKETS
        ).labels(model_name=model)
        self._decode = histogram(
            "dgpp_request_decode_time_seconds", "From the first token to the last.", DECODE_BUCKETS
        ).labels(model_name=model)

    def sent(self, messages: Iterable[ToEngine]) -> None:
        """Messages go to the engine."""
        for message in messages:
            if isinstance(message, Submit):
                self._choices[message.id] = _Choice(self._clock())

    def came(self, message: FromEngine) -> None:
        """A message comes from the engine."""
        if isinstance(message, Beat):
            self._beat = self._clock()
        elif isinstance(message, Output):
            self._output(message)

    def _output(self, output: Output) -> None:
        now, choices = self._clock(), self._choices
        for update in output.updates:
            choice = choices.get(update.id)
            if choice is None:
                continue
            if choice.first:
                self._gap.observe(now - choice.last)
            else:
                choice.first = now
            choice.last = now
        for ending in output.endings:
            choice = choices.pop(ending.id, None)
            if choice is not None and choice.first:
                self._ended(choice, hit=ending.cached_tokens > 0)

    def _ended(self, choice: _Choice, *, hit: bool) -> None:
        waited = choice.first - choice.submitted
        (self.hits if hit else self.misses).add(waited)
        (self._first_hit if hit else self._first_miss).observe(waited)
        self._decode.observe(choice.last - choice.first)

    def elapsed_ms(self, choice: int) -> float:
        """Time since a choice was submitted, 0 if it has ended."""
        found = self._choices.get(choice)
        return 0.0 if found is None else round((self._clock() - found.submitted) * 1e3, 1)

    def beat_age_ms(self) -> float:
        """Time since the engine's counters came."""
        return round((self._clock() - self._beat) * 1e3, 1)
