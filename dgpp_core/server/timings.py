"""How long choices take, from what goes to the engine and what comes back. The clock is an argument."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec
from prometheus_client.core import HistogramMetricFamily, Metric

from dgpp_core.scheduler.messages import Beat, FromEngine, Output, Submit, ToEngine

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DECODE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _Choice(msgspec.Struct):
    """A choice in the engine: seconds of its submission, its first and its last tokens."""

    submitted: float
    first: float = 0.0
    last: float = 0.0


class Durations:
    """A histogram of seconds. Filled for every token, so it does less than the one of `prometheus_client`.

    Args:
        bounds: the upper bounds of the buckets, ascending; one without a bound comes after them.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._seconds += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self._counts)

    @property
    def mean_ms(self) -> float:
        """The mean in milliseconds, 0 of none."""
        return round(self._seconds * 1e3 / self.count, 3) if self.count else 0.0

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        """Put it into a family of the exposition."""
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._seconds)


class Timings:
    """Follows every choice from its submission to its end. A collector of `prometheus_client` too.

    Attributes:
        hits, misses: time to the first token of choices that found a prefix in the cache, and of those that did not.
    """

    def __init__(self, clock: Callable[[], float], model: str) -> None:
        self._clock = clock
        self._choices: dict[int, _Choice] = {}
        self._beat = clock()
        self._model = model
        self.hits, self.misses = Durations(TTFT_BUCKETS), Durations(TTFT_BUCKETS)
        self._gaps, self._decodes = Durations(GAP_BUCKETS), Durations(DECODE_BUCKETS)

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
                self._gaps.add(now - choice.last)
            else:
                choice.first = now
            choice.last = now
        for ending in output.endings:
            choice = choices.pop(ending.id, None)
            if choice is not None and choice.first:
                self._ended(choice, hit=ending.cached_tokens > 0)

    def _ended(self, choice: _Choice, *, hit: bool) -> None:
        (self.hits if hit else self.misses).add(choice.first - choice.submitted)
        self._decodes.add(choice.last - choice.first)

    def elapsed_ms(self, choice: int) -> float:
        """Time since a choice was submitted, 0 if it has ended."""
        found = self._choices.get(choice)
        return 0.0 if found is None else round((self._clock() - found.submitted) * 1e3, 1)

    def collect(self) -> Iterable[Metric]:
        """The histograms as they are now."""
        first = HistogramMetricFamily(
            "dgpp_time_to_first_token_seconds",
            "From submission to the first token.",
            labels=("model_name", "prefix_cache"),
        )
        self.hits.add_to(first, (self._model, "hit"))
        self.misses.add_to(first, (self._model, "miss"))
        yield first
        for name, about, durations in (
            ("inter_token_latency", "Between steps that gave a choice tokens.", self._gaps),
            ("request_decode_time", "From the first token to the last.", self._decodes),
        ):
            family = HistogramMetricFamily(f"dgpp_{name}_seconds", about, labels=("model_name",))
            durations.add_to(family, (self._model,))
            yield family

    def beat_age_ms(self) -> float:
        """Time since the engine's counters came."""
        return round((self._clock() - self._beat) * 1e3, 1)
