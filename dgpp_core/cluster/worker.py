"""The engine process of rank 0: ``python -m dgpp_core.cluster.worker --fd N``.

The first frame says what to serve. From `Ready` on, one loop: take what came in, let the scheduler plan a tick, send
what the tick before committed, execute. A thread of its own says every 0.2 s that the process runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.boot import Assignment, Built, build, set_threads
from dgpp_core.cluster.channel import Channel
from dgpp_core.cluster.lead import Lead
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.cluster.rank import Rank
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.factory import Progress
from dgpp_core.host.loading import load_plugins
from dgpp_core.scheduler.messages import VERSION, Boot, Failed, Loading, Ready

BEAT_SECONDS = 0.2


def serve(channel: Channel, clock: Callable[[], float]) -> int:
    """Boot and run to the end; the exit status."""
    message = channel.receive()
    if message is None:
        return 0
    if not isinstance(message, Boot):
        raise EngineError("the first frame must say what to serve", found=type(message).__name__, expected="Boot")
    started = clock()
    what, report = _assignment(message), _throttled(channel, clock)
    set_threads(what.here)
    if message.ranks is None:
        built = build(what, lambda device: None, report, Pulse(clock))
        rank = Rank(built.served, channel, clock, built.compiles, message.model)
        _run(channel, rank, _ready(built, clock() - started))
        return 0
    lead = Lead(message, message.ranks, what, channel, report, clock)
    try:
        built = lead.start()
        _run(channel, lead.rank(built, clock, message.model), _ready(built, clock() - started))
        lead.finish()
    except Exception as error:
        lead.fail(error)
    return 0


def _assignment(message: Boot) -> Assignment:
    if message.version != VERSION:
        raise EngineError(
            "front end and engine speak different versions", found=str(message.version), expected=str(VERSION)
        )
    return Assignment(
        model=load_plugins(environ=os.environ).model(message.model),
        checkpoint=Path(message.checkpoint),
        device=message.device,
        settings=msgspec.json.decode(message.settings, type=EngineSettings),
        image_cache=message.image_cache,
        world=message.ranks.world if message.ranks else 1,
        here=message.ranks.here if message.ranks else 1,
    )


def _ready(built: Built, seconds: float) -> Ready:
    config, geometry = built.prepared.config, built.prepared.geometry
    return Ready(
        version=VERSION,
        pid=os.getpid(),
        vocab_size=config.vocab_size,
        context_tokens=geometry.context,
        position_ceiling=config.max_positions,
        pool_tokens=geometry.blocks * geometry.block_tokens,
        constrained=built.constrained,
        row_exact=built.exact,
        load_seconds=seconds,
        plan=built.plan.table(),
    )


def _run(channel: Channel, rank: Rank, ready: Ready) -> None:
    """Serve to the orderly end."""
    channel.send(ready)
    channel.start()
    threading.Thread(target=_beat, args=(channel, rank), name="beat", daemon=True).start()
    rank.run()


def _throttled(channel: Channel, clock: Callable[[], float]) -> Progress:
    """Progress at most ten times a second, and always the last of a stage."""
    last = [float("-inf")]

    def report(stage: str, done: int, total: int) -> None:
        if done >= total or clock() - last[0] > 0.1:
            last[0] = clock()
            channel.send(Loading(stage, done, total))

    return report


def _beat(channel: Channel, rank: Rank) -> None:
    while True:
        try:
            channel.send(rank.beat())
        except OSError:
            return
        time.sleep(BEAT_SECONDS)


def main(argv: list[str]) -> int:
    """Entry point; every failure is sent as `Failed` before the process ends."""
    parser = argparse.ArgumentParser(prog="dgpp-engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the connected socket")
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank 0: %(message)s")
    # A terminal's Ctrl-C reaches the whole process group; the front end decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(sock, on_close=lambda: os._exit(0))
    try:
        return serve(channel, time.monotonic)
    except DgppError as error:
        failed = Failed(error.line(), str(error), error.exit_code)
    except Exception as error:
        failed = Failed(f"{type(error).__name__}: {error}", traceback.format_exc(), 2)
    try:
        channel.send(failed)
    except OSError:
        print(failed.detail, file=sys.stderr)
    return failed.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
