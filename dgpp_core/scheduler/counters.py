"""What the scheduler counts, under the names of `Stats`."""

from __future__ import annotations

import msgspec

from dgpp_core.scheduler.messages import Reason


class Counters(msgspec.Struct):
    """Totals since the start. Work for requests that were cancelled or preempted stays counted."""

    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_preempted: int = 0
    tokens_generated: int = 0
    prompts_prefilled: int = 0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    draft_rounds: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    def end(self, reason: Reason) -> None:
        """A request ended."""
        if reason == "cancelled":
            self.requests_cancelled += 1
        else:
            self.requests_finished += 1

    def prefilled(self, prompt_tokens: int) -> None:
        """A request's first token came."""
        self.prompts_prefilled += 1
        self.prompt_tokens += prompt_tokens

    def committed(self, *, tokens: int, drafted: int, accepted: int) -> None:
        """A step's result came: ``tokens`` after, ``accepted`` drafts before trimming at an ending."""
        self.tokens_generated += tokens
        if drafted:
            self.draft_rounds += 1
            self.draft_tokens += drafted
            self.draft_accepted += accepted
            self.drafted_at = _counted(self.drafted_at, drafted)
            self.accepted_at = _counted(self.accepted_at, accepted, at_least=drafted)

    def decode(self, requests: int, width: int) -> None:
        """One decode step of ``requests`` requests with ``width`` rows each was launched."""
        self.decode_steps += 1
        self.decode_rows += requests * width


def _counted(totals: tuple[int, ...], first: int, at_least: int = 0) -> tuple[int, ...]:
    """One more for each of the ``first`` positions; there are ``at_least`` so many."""
    size = max(len(totals), first, at_least)
    return tuple((totals[at] if at < len(totals) else 0) + (at < first) for at in range(size))
