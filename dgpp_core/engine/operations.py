"""What the scheduler tells the engine to do in one tick, and what the engine answers. Torch-free.

Operations are executed in order. They carry no measured or local value, so every rank derives the same ones and their
digest can be compared.
"""

from __future__ import annotations

import msgspec

from dgpp_core.images.picture import Picture
from dgpp_core.sampling.logprobs import TokenLogprobs as TokenLogprobs
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.text.grammar.spec import Grammar


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A request takes a slot: ``cached`` tokens of its prompt are already in ``blocks`` and in snapshot ``arena``.

    Attributes:
        grammar: what the reply is held to.
        replied: tokens at the end of the prompt that are part of the reply: it goes on after it lost its slot.
        pictures: images in the prompt, in the order of their places.
    """

    slot: int
    request: int
    prompt: tuple[int, ...]
    params: SamplingParams
    logprobs: int
    blocks: tuple[int, ...]
    cached: int
    arena: int = -1
    grammar: Grammar | None = None
    replied: int = 0
    pictures: tuple[Picture, ...] = ()


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Blocks appended to a slot's table."""

    slot: int
    blocks: tuple[int, ...]


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute prompt tokens ``start .. start + count``; ``last`` picks the first token."""

    slot: int
    start: int
    count: int
    last: bool


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """One step for each of ``slots``, verifying ``depth`` drafts each."""

    slots: tuple[int, ...]
    depth: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Copy the window and recurrent state of a slot into the arena.

    With a ``position`` it is the state at that length, and is copied only if the step before it ended there or passed
    it: only the device knows that yet.
    """

    slot: int
    arena: int
    position: int = -1


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The slot is free; its state is dead."""

    slot: int


Operation = Begin | Extend | Prefill | Decode | Snapshot | Release


class SlotResult(msgspec.Struct, frozen=True):
    """Tokens that one operation committed for a request.

    Attributes:
        drafted: drafts that it verified.
        fault: why the request's grammar allows no more, if so.
        confidence: of each draft for the next step, the logit of the probability that it stands if those before it do;
            empty where the drafter does not say.
    """

    slot: int
    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    drafted: int = 0
    fault: str = ""
    confidence: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """Everything one tick's operations committed."""

    tick: int
    slots: tuple[SlotResult, ...]
