"""A line of statistics every so many seconds while there is work: what was done since the last one, and what runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from dgpp_core.scheduler.messages import Stats
from dgpp_core.server.counters import Counters
from dgpp_core.server.logs import fields
from dgpp_core.server.service import Service

log = logging.getLogger("dgpp.stats")


class StatsLine(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in ``seconds``, and what was there at their end.

    Rates are per second of that time. A prompt's first token is none that was decoded. ``decode_share`` is the part of
    the time, from 0 to 1, that steps took which decoded, ``prefill_share`` that of those that only read prompts.
    """

    seconds: float
    decode_tokens: int
    decode_tokens_s: float
    decode_steps: int
    step_ms: float
    decode_share: float
    drafts: int
    drafts_accepted: int
    prompts: int
    prefill_tokens: int
    prefill_tokens_s: float
    prefill_share: float
    cached_tokens: int
    running: int
    reading: int
    queued: int
    blocks: int
    blocks_total: int
    snapshots: int
    snapshots_total: int
    requests: int
    shed: int
    cancelled: int
    failed: int

    def text(self) -> str:
        """The line of a text log."""
        drafts = f"drafts {self.drafts_accepted}/{self.drafts} stood" if self.drafts else ""
        parts = (
            f"{self.seconds:.1f} s",
            f"decode {self.decode_tokens} tokens, {self.decode_tokens_s:.1f}/s, {self.decode_steps} steps of"
            f" {self.step_ms:.2f} ms, {self.decode_share:.0%}",
            drafts,
            f"prefill {self.prompts} prompts, {self.prefill_tokens} tokens, {self.prefill_tokens_s:.1f}/s,"
            f" {self.prefill_share:.0%}, {self.cached_tokens} cached",
            f"running {self.running}, reading {self.reading}, queued {self.queued}",
            f"blocks {self.blocks}/{self.blocks_total}",
            f"snapshots {self.snapshots}/{self.snapshots_total}" if self.snapshots_total else "",
            f"requests {self.requests}, shed {self.shed}, cancelled {self.cancelled}, failed {self.failed}",
        )
        return " | ".join(filter(None, parts))


class _Mark(msgspec.Struct, frozen=True):
    """Counters at one moment."""

    time: float
    stats: Stats
    requests: int
    shed: int
    cancelled: int
    failed: int


class Reporter:
    """Makes lines of what has changed.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], stats: Stats, counters: Counters) -> None:
        self._clock = clock
        self._last = self._mark(stats, counters)
        self._worked = False

    def line(self, stats: Stats, counters: Counters) -> StatsLine | None:
        """The line of the time since the last call: None while there is nothing to do, but for the first such time."""
        before, now = self._last, self._mark(stats, counters)
        self._last = now
        made, was = _line(before, now), self._worked
        busy = made.running or made.reading or made.queued
        done = made.decode_steps or made.prompts or made.requests or made.shed or made.prefill_share
        self._worked = bool(busy or done)
        return made if self._worked or was else None

    def _mark(self, stats: Stats, counters: Counters) -> _Mark:
        return _Mark(self._clock(), stats, counters.requests, counters.shed, counters.cancelled, counters.failed)


def _line(before: _Mark, now: _Mark) -> StatsLine:
    old, new, seconds = before.stats, now.stats, now.time - before.time
    step_ms, prefill_ms = new.step_ms - old.step_ms, new.prefill_ms - old.prefill_ms
    steps, prompts = new.decode_steps - old.decode_steps, new.prompts_prefilled - old.prompts_prefilled
    decoded = max(new.tokens_generated - old.tokens_generated - prompts, 0)
    computed = new.prompt_tokens_computed - old.prompt_tokens_computed
    return StatsLine(
        seconds=round(seconds, 3),
        decode_tokens=decoded,
        decode_tokens_s=_rate(decoded, seconds),
        decode_steps=steps,
        step_ms=_rate(step_ms, steps),
        decode_share=_rate(step_ms / 1e3, seconds),
        drafts=new.draft_tokens - old.draft_tokens,
        drafts_accepted=new.draft_accepted - old.draft_accepted,
        prompts=prompts,
        prefill_tokens=computed,
        prefill_tokens_s=_rate(computed, seconds),
        prefill_share=_rate(prefill_ms / 1e3, seconds),
        cached_tokens=new.cache_tokens_saved - old.cache_tokens_saved,
        running=new.active,
        reading=new.prefilling,
        queued=new.queued,
        blocks=new.blocks_in_use,
        blocks_total=new.blocks_total,
        snapshots=new.snapshots_in_use,
        snapshots_total=new.snapshots_total,
        requests=now.requests - before.requests,
        shed=now.shed - before.shed,
        cancelled=now.cancelled - before.cancelled,
        failed=now.failed - before.failed,
    )


def _rate(amount: float, per: float) -> float:
    """``amount`` for one of ``per``; 0 where there were none."""
    return round(amount / per, 4) if per > 0 else 0.0


async def report(service: Service, interval: float) -> None:
    """Log a line every ``interval`` seconds, until it is cancelled."""
    reporter = Reporter(service.outside.clock, service.client.stats, service.counters)
    while True:
        await asyncio.sleep(interval)
        if line := reporter.line(service.client.stats, service.counters):
            log.info("%s", line.text(), extra=fields(line))
