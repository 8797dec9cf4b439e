"""One generation: the choices of a request, from the engine's ids to text and calls. Streamed or not, it is this."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.engine.operations import TokenLogprobs
from dgpp_core.scheduler.messages import Ending, Submit, Update
from dgpp_core.server.call_ids import CallIds
from dgpp_core.server.engine_client import EngineClient, Inbox, shutting_down
from dgpp_core.server.job import Job
from dgpp_core.server.served import Served
from dgpp_core.text.reply import Delta, Part, ReplyParser
from dgpp_core.text.tools.events import ArgumentsDelta, CallOpened
from dgpp_core.text.tools.parser import CallParser


class TokenEntry(msgspec.Struct, frozen=True):
    """A token that became visible, and how likely it was."""

    id: int
    logprobs: TokenLogprobs


class Piece(msgspec.Struct, frozen=True):
    """Text of one choice; ``reasoning`` says which member of the message it continues."""

    index: int
    reasoning: bool
    text: str
    entries: tuple[TokenEntry, ...] = ()


class CallStart(msgspec.Struct, frozen=True, kw_only=True):
    """Tool call number ``call`` of a choice begins; ``custom`` is one whose input is any text."""

    index: int
    call: int
    id: str
    name: str
    custom: bool = False


class CallArguments(msgspec.Struct, frozen=True, kw_only=True):
    """``text`` continues the JSON text of a call's arguments, or the input of a custom call."""

    index: int
    call: int
    text: str
    custom: bool = False


class Finish(msgspec.Struct, frozen=True):
    """A choice is complete, for the reason that clients are told; ``stop`` is the stop string that ended it, if any."""

    index: int
    reason: str
    stop: str = ""


Event = Piece | CallStart | CallArguments | Finish


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request: the prompt once, the replies of all choices together.

    ``known`` and ``miss`` are those of the first choice's `Ending`.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int
    known: int = 0
    miss: str = ""


class Choice:
    """One scheduler request and the text it has made.

    Attributes:
        ended: the engine has let go of it.
        completion_tokens: up to and including the one that completed a stop string.
    """

    def __init__(
        self, index: int, request: int, parser: ReplyParser, call_ids: CallIds, *, keeps_logprobs: bool
    ) -> None:
        self.index, self.id = index, request
        self.ended = False
        self.stop_sent = False
        self.completion_tokens = 0
        self.cached_tokens = self.known_tokens = 0
        self.miss = ""
        self.parser = parser
        self._call_ids = call_ids
        self._custom = False
        self._logprobs: list[TokenEntry] | None = [] if keeps_logprobs else None

    def take(self, update: Update) -> list[Event]:
        """What an update adds. Tokens after a stop string do not count: they were on their way already."""
        parser = self.parser
        events: list[Event] = []
        for position, token in enumerate(update.tokens):
            if parser.stopped:
                break
            self.completion_tokens += 1
            if self._logprobs is not None and update.logprobs is not None:
                self._logprobs.append(TokenEntry(token, update.logprobs[position]))
            events += self._events(parser.push(token))
        return events

    def finish(self, ending: Ending) -> list[Event]:
        """What was held back, and why the choice ended.

        Raises:
            RequestError: the engine gave the request up.
        """
        self.ended = True
        self.cached_tokens, self.known_tokens, self.miss = ending.cached_tokens, ending.known_tokens, ending.miss
        events = self._events(self.parser.finish())
        if ending.reason == "error":
            raise RequestError(f"the engine gave up this request: {ending.error}", status=503, code="engine_failure")
        if ending.reason == "cancelled":
            raise shutting_down()
        return [*events, Finish(self.index, self._reason(ending), self.parser.stop_string)]

    def _reason(self, ending: Ending) -> str:
        if self.parser.stopped or ending.reason == "stop":
            return "stop"
        if ending.reason == "length":
            return "length"
        return "tool_calls" if self.parser.call_count else "stop"

    def _events(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Delta):
                events.append(self._piece(part))
            elif isinstance(part, CallOpened):
                number = self._call_ids.of(self.index, part.call)
                self._custom = part.custom
                events.append(
                    CallStart(index=self.index, call=part.call, id=number, name=part.name, custom=part.custom)
                )
            elif isinstance(part, ArgumentsDelta):
                events.append(CallArguments(index=self.index, call=part.call, text=part.text, custom=self._custom))
        return events

    def _piece(self, delta: Delta) -> Piece:
        known = self._logprobs
        entries = () if known is None else tuple(known[token] for token in delta.tokens)
        return Piece(self.index, delta.kind == "reasoning", delta.text, entries)


class Generation:
    """A request in the engine. Iterate `batches` once, and `close` it whatever happens.

    Args:
        draw_seed: gives 64 random bits, for a request without a seed.

    Raises:
        RequestError: the engine takes no requests now.
    """

    def __init__(self, job: Job, served: Served, client: EngineClient, draw_seed: Callable[[], int]) -> None:
        self.job = job
        self._client = client
        self._inbox = Inbox()
        seed = job.params.seed if job.seeded else draw_seed()
        ids = client.ids(job.n)
        eos = served.text.defaults.eos_ids
        call_ids = CallIds(job.tokens, seed % 2**64)
        self.choices = [
            Choice(index, request, _parser(job, served), call_ids, keeps_logprobs=job.logprobs >= 0)
            for index, request in enumerate(ids)
        ]
        self._by_id = {choice.id: choice for choice in self.choices}
        client.submit(
            [
                Submit(
                    id=request,
                    tokens=job.tokens,
                    max_tokens=job.max_tokens,
                    params=msgspec.structs.replace(job.params, seed=(seed + index) % 2**64),
                    logprobs=job.logprobs,
                    eos_ids=() if job.ignore_eos else eos,
                    use_cache=job.use_cache,
                    turns=job.turns,
                    grammar=job.grammar,
                    pictures=job.pictures,
                )
                for index, request in enumerate(ids)
            ],
            self._inbox,
        )

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt=len(self.job.tokens),
            completion=sum(choice.completion_tokens for choice in self.choices),
            cached=self.choices[0].cached_tokens,
            known=self.choices[0].known_tokens,
            miss=self.choices[0].miss,
            reasoning=sum(choice.parser.reasoning_tokens for choice in self.choices),
        )

    async def batches(self) -> AsyncIterator[Sequence[Event]]:
        """Events as they come, those of one wake-up together; an empty batch after ``job.ping_s`` of silence.

        Raises:
            RequestError: the engine failed or the server stops. Everything before that has been given out.
        """
        now = asyncio.get_running_loop().time
        ping = self.job.ping_s
        remaining, quiet_since = len(self.choices), now()
        while remaining:
            batch: list[Event] = []
            error: RequestError | None = None
            for event in await self._inbox.take(None if ping is None else max(quiet_since + ping - now(), 0.0)):
                try:
                    if isinstance(event, Update):
                        batch += self._update(event)
                    else:
                        batch += self._end(event)
                        remaining -= 1
                except RequestError as failure:
                    error = failure
                    break
            if batch or (ping is not None and now() >= quiet_since + ping):
                yield batch
                quiet_since = now()
            if error is not None:
                raise error

    def _update(self, update: Update) -> list[Event]:
        choice = self._by_id[update.id]
        events = choice.take(update)
        if choice.parser.stopped and not choice.stop_sent:
            choice.stop_sent = True
            self._client.stop(choice.id)
        return events

    def _end(self, event: Ending | RequestError) -> list[Event]:
        if isinstance(event, RequestError):
            raise event
        return self._by_id[event.id].finish(event)

    def close(self) -> int:
        """Cancel what has not ended and was not told to; returns how many choices that were. Safe to call twice."""
        cancelled = 0
        for choice in self.choices:
            if not choice.ended:
                choice.ended = True
                if not choice.stop_sent:
                    self._client.cancel(choice.id)
                    cancelled += 1
        return cancelled


def _parser(job: Job, served: Served) -> ReplyParser:
    dialect = served.text.tools
    return ReplyParser(
        served.text.tokenizer,
        reasoning=served.text.reasoning if job.splits_reasoning else None,
        in_reasoning=job.in_reasoning,
        stops=job.stops,
        hidden_ids=frozenset(served.text.defaults.eos_ids),
        reasoning_in_content=served.options.reasoning_in_content,
        calls=None
        if dialect is None or job.calls is None
        else CallParser(dialect, job.calls, incremental=job.grammar is not None and job.grammar.source != ""),
        shown=dialect.markers if dialect is not None and job.splits_reasoning else (),
    )
