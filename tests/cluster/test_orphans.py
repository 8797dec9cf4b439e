"""Whoever starts a service is killed: nothing of it stays."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from dgpp_core.testing.served_world import START_S, ServedWorld, await_line, free_port

LIMIT_S = 2.0
RANKS = ("cluster.worker", "cluster.peer")
STARTS = """
import subprocess, sys, time
from dgpp_core.host.child import module_command
subprocess.Popen(module_command("dgpp_core.cli", "serve", *sys.argv[1:]))
time.sleep(600)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended"),
]


class Process:
    """A process, told from a later one of the same number by when it was started."""

    def __init__(self, pid: int) -> None:
        self.pid, self._stat = pid, Path(f"/proc/{pid}/stat")
        self.line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        self._started = self._fields()[19]

    def _fields(self) -> list[str]:
        return self._stat.read_text().rpartition(")")[2].split()

    @property
    def lives(self) -> bool:
        try:
            fields = self._fields()
        except OSError:
            return False
        return fields[0] != "Z" and fields[19] == self._started


def descendants(pid: int) -> list[Process]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    found.append(Process(child))
                found += descendants(child)
    return found


@contextlib.contextmanager
def starter(glm: Path, environ: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    line = [
        sys.executable, "-c", STARTS, "--plugin=glm47", f"--checkpoint={glm}", "--world=2", "--model-alias=world",
        f"--port={free_port()}", f"--log-dir={folder}",
    ]  # fmt: skip
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_nothing_stays_of_a_service_that_was_only_just_started(
    glm: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    """The ranks import torch then, which takes seconds."""
    with starter(glm, environ, tmp_path) as process:
        all_go(process, until=lambda lines: all(any(rank in line for line in lines) for rank in RANKS))


def test_nothing_stays_of_a_service_at_work(glm: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    with starter(glm, environ, tmp_path) as process:
        ready = await_line(process)
        assert ready.startswith("READY")
        world = ServedWorld(process, ready.split()[1].removesuffix("/v1"), tmp_path)
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        assert world.complete("Hello", 8, response_format=schema).status == 200
        wanted = (*RANKS, "grammar.worker")
        all_go(process, until=lambda lines: all(any(name in line for line in lines) for name in wanted))


def all_go(process: subprocess.Popen[str], until: Callable[[list[str]], bool]) -> None:
    """Kill the starter as soon as its descendants are as they should be; none of them may be there 2 s later."""
    end, found = time.monotonic() + START_S, descendants(process.pid)
    while not until([each.line for each in found]):
        assert time.monotonic() < end, [each.line for each in found]
        time.sleep(0.01)
        found = descendants(process.pid)
    process.kill()
    end = time.monotonic() + LIMIT_S
    while left := [each.line for each in found if each.lives]:
        assert time.monotonic() < end, left
        time.sleep(0.01)
