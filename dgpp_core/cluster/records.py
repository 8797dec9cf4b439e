"""What ranks tell each other over the journal: msgpack structs, each the body of one frame (`frames`). Torch-free.

Rank 0 leads, the others follow. A star: followers speak with rank 0 alone.

    follower: Hello                      Vote                Compiled, Heartbeat ...            Bye
    rank 0:            Era | Refused           Go    Tick, Compile, Heartbeat ...    End | Halt
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dgpp_core.bus.transports import Transport
from dgpp_core.cluster.identity import Build, Terms
from dgpp_core.engine.operations import Operation, StepResult
from dgpp_core.scheduler.messages import Submit
from dgpp_core.text.grammar.spec import Grammar

PROTOCOL = 1

Phase = Literal["loading", "waiting", "working", "collective"]
"""What a rank's loop does: it is not ready, waits for something to do, computes, or is in a collective of a CPU."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A rank that wants to join.

    Attributes:
        epoch: which start of the world it was started for.
        process: host and process id.
        settings: the engine settings it was started with, as JSON; empty takes rank 0's.
    """

    protocol: int
    rank: int
    world: int
    epoch: int
    process: str
    build: Build
    settings: bytes = b""


class Era(msgspec.Struct, frozen=True, kw_only=True, tag="era"):
    """Rank 0 takes a rank in, and says what is served: the settings record.

    Attributes:
        model: the spec's name.
        settings: the resolved engine settings as JSON; they go before the follower's own.
        fabric_port: where the bus meets, on rank 0's host.
        bus: the transport that it takes.
    """

    epoch: int
    world: int
    model: str
    settings: bytes
    fabric_port: int
    bus: Transport = "gloo"


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Rank 0 does not take the rank in."""

    reason: str


class Vote(msgspec.Struct, frozen=True, tag="vote"):
    """A follower is built and would serve on these terms.

    Attributes:
        longest: seconds that its loop was at one thing for during the rehearsal.
    """

    terms: Terms
    longest: float = 0.0


class Go(msgspec.Struct, frozen=True, tag="go"):
    """All ranks voted for the same."""


class Tick(msgspec.Struct, frozen=True, kw_only=True, tag="tick"):
    """One step of every rank's loop: what rank 0's scheduler is given, in order of arrival.

    Attributes:
        number: 1, 2, 3 ... without a gap.
        digest: rank 0's `OperationStream.digest` before this step.
    """

    number: int
    digest: int
    submissions: tuple[Submit, ...] = ()
    cancels: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Compile a grammar whose request will come, so that no step waits for it."""

    id: int
    grammar: Grammar


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """The follower is through with it; whether it failed is found again, alike on every rank, in the step."""

    id: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """How a rank's loop is, both ways several times a second.

    Attributes:
        step, digest: the last step that the rank finished, and its digest after it.
        phase: what the loop does.
        age: seconds since it last did something else.
        call: the collective that it is in or was in last.
    """

    step: int
    digest: int
    phase: Phase
    age: float
    call: str = ""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did in a step; equal on all ranks.

    Attributes:
        digest: of everything up to and including this step.
    """

    number: int
    digest: int
    operations: tuple[Operation, ...]
    results: tuple[StepResult, ...]


class Diverged(msgspec.Struct, frozen=True, tag="diverged"):
    """The follower has another digest than rank 0 says; its last steps, oldest first."""

    steps: tuple[Step, ...]


class Account(msgspec.Struct, frozen=True, tag="account"):
    """Rank 0 has another digest than a `Heartbeat` says, and wants the follower's last steps."""


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The follower cannot go on.

    Attributes:
        collective: it failed in a collective, so that another rank may be the cause.
    """

    what: str
    detail: str
    exit_code: int
    collective: bool = False


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """The world has failed; every rank leaves at once."""

    reason: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """The orderly end, with how many steps rank 0 took and its digest of them all."""

    step: int
    digest: int


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The follower leaves in order, with its own account."""

    step: int
    digest: int


FromFollower = Hello | Vote | Compiled | Heartbeat | Diverged | Gone | Bye
FromLeader = Era | Refused | Go | Tick | Compile | Heartbeat | Account | Halt | End

_encoder = msgspec.msgpack.Encoder()
from_follower = msgspec.msgpack.Decoder(FromFollower).decode
"""The body of a follower's frame to its record; raises `msgspec.DecodeError`."""
from_leader = msgspec.msgpack.Decoder(FromLeader).decode
"""The body of one of rank 0's frames to its record; raises `msgspec.DecodeError`."""


def encode(record: FromFollower | FromLeader) -> bytes:
    """The body of a frame."""
    return _encoder.encode(record)
