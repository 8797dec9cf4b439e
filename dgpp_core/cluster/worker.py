"""The engine process of rank 0: ``python -m dgpp_core.cluster.worker --fd N``.

The first frame says what to serve. From `Ready` on, one loop: take what came in, let the scheduler plan a tick, send
what the tick before committed, execute. A thread of its own says every 0.2 s that the process runs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from dgpp_core.api import DgppError, EngineError, ModelConfig
from dgpp_core.checkpoint.image import ImageCache
from dgpp_core.cluster.channel import Channel
from dgpp_core.cluster.rank import Rank
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import Progress, build_engine, pick_device, prepare
from dgpp_core.engine.memory import LinuxMemory, check_floor
from dgpp_core.engine.plan import make_plan
from dgpp_core.engine.rehearsal import rehearse, warm
from dgpp_core.formats.resident import DeviceKind
from dgpp_core.host.loading import load_plugins
from dgpp_core.scheduler.messages import VERSION, Boot, Failed, Loading, Ready
from dgpp_core.scheduler.sizing import step_depths
from dgpp_core.text.grammar.vocabulary import Vocabulary
from dgpp_core.text.tokenizer import Tokenizer

BEAT_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def boot(channel: Channel, message: Boot, clock: Callable[[], float]) -> Rank:
    """Plan, load, rehearse; ends with `Ready` sent."""
    started = clock()
    if message.version != VERSION:
        raise EngineError(
            "front end and engine speak different versions", found=str(message.version), expected=str(VERSION)
        )
    settings = msgspec.json.decode(message.settings, type=EngineSettings)
    model = load_plugins(environ=os.environ).model(message.model)
    device = pick_device(message.device)
    kind: DeviceKind = "cpu" if device.type == "cpu" else "cuda"
    settings = settings.on_device(gpu=kind == "cuda")
    prepared = prepare(model, Path(message.checkpoint), settings, kind)
    plan = make_plan(
        table=model.bindings(prepared.config),
        groups=prepared.groups,
        config=prepared.config,
        settings=settings,
        world=1,
        device_kind=kind,
        step_width=prepared.geometry.step_width,
        extra=model.plan_terms(prepared.config, 1, msgspec.to_builtins(settings)),
        available=_available(device),
    )
    plan.require()
    compiles = CompileCounter()
    if kind == "cuda":
        compiles.install()
    report = _guarded(_throttled(channel, clock), plan.headroom // 2)
    with ThreadPoolExecutor(1) as beside:
        vocabulary = beside.submit(_vocabulary, Path(message.checkpoint), prepared.config)
        engine = build_engine(prepared, device, report, images=_images(message, settings, kind))
    if (tokens := vocabulary.result()) is not None:
        engine.offer_grammars(tokens)
    exact = _make_ready(engine, settings, channel)
    rank = Rank(engine, settings, channel, clock, compiles, message.model)
    channel.send(
        Ready(
            version=VERSION,
            pid=os.getpid(),
            vocab_size=prepared.config.vocab_size,
            context_tokens=prepared.geometry.context,
            position_ceiling=prepared.config.max_positions,
            pool_tokens=prepared.geometry.blocks * prepared.geometry.block_tokens,
            constrained=tokens is not None,
            row_exact=exact,
            load_seconds=clock() - started,
            plan=plan.table(),
        )
    )
    return rank


def _make_ready(engine: Engine, settings: EngineSettings, channel: Channel) -> bool:
    """Capture, compile and rehearse what will be served; whether rows are independent of their neighbours."""
    chunk = min(settings.idle_budget or engine.geometry.context, engine.geometry.context)
    if engine.device.type == "cuda":
        if settings.decode_graph:
            for family in engine.use_graphs(step_depths(engine.geometry, settings)):
                channel.send(Loading(f"graph: {family}"))
        channel.send(Loading("kernels"))
        warm(engine, chunk)
    channel.send(Loading("rehearsal"))
    return rehearse(engine, chunk, engine.vocab_size)


def _vocabulary(checkpoint: Path, config: ModelConfig) -> Vocabulary | None:
    """What grammars are made of; None where the checkpoint has no tokenizer or no token that ends a reply."""
    if not config.eos_ids or not (checkpoint / "tokenizer.json").is_file():
        return None
    return Vocabulary.of(Tokenizer.load(checkpoint), config.vocab_size, config.eos_ids[0])


def _images(message: Boot, settings: EngineSettings, kind: DeviceKind) -> ImageCache | None:
    """Where resident images are kept: of GPUs, since a CPU packs weights into a form that no file can hold."""
    if kind == "cpu" or not message.image_cache:
        return None
    return ImageCache(Path(message.image_cache), f"bf16_weights {settings.bf16_weights}")


def _available(device: torch.device) -> int:
    return LinuxMemory().available() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _throttled(channel: Channel, clock: Callable[[], float]) -> Progress:
    """Progress at most ten times a second, and always the last of a stage."""
    last = [float("-inf")]

    def report(stage: str, done: int, total: int) -> None:
        if done >= total or clock() - last[0] > 0.1:
            last[0] = clock()
            channel.send(Loading(stage, done, total))

    return report


def _guarded(report: Progress, floor: int) -> Progress:
    """Stop while loading before the machine starts to swap."""
    memory = LinuxMemory()

    def guarded(stage: str, done: int, total: int) -> None:
        check_floor(memory, floor, f"loading {stage}")
        report(stage, done, total)

    return guarded


def _beat(channel: Channel, rank: Rank) -> None:
    while True:
        try:
            channel.send(rank.beat())
        except OSError:
            return
        time.sleep(BEAT_SECONDS)


def serve(channel: Channel, clock: Callable[[], float]) -> int:
    """Boot and run to the end; the exit status."""
    message = channel.receive()
    if message is None:
        return 0
    if not isinstance(message, Boot):
        raise EngineError("the first frame must say what to serve", found=type(message).__name__, expected="Boot")
    rank = boot(channel, message, clock)
    channel.start()
    threading.Thread(target=_beat, args=(channel, rank), name="beat", daemon=True).start()
    rank.run()
    return 0


def main(argv: list[str]) -> int:
    """Entry point; every failure is sent as `Failed` before the process ends."""
    parser = argparse.ArgumentParser(prog="dgpp-engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the connected socket")
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    # A terminal's Ctrl-C reaches the whole process group; the front end decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not os.environ.get("OMP_NUM_THREADS"):  # torch has followed that already; its own default ignores the affinity
        torch.set_num_threads(len(os.sched_getaffinity(0)))
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
