"""`run` in a process of its own: READY, signals, exit statuses."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from dgpp_core.host.child import program_command
from dgpp_core.testing.fake_worker import FakeReply, FakeScript

PROGRAM = """
import sys
from dgpp_core.config.settings import HttpSettings
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.supervisor import Timing, run
folder, port, script = sys.argv[1:]
options = ServeOptions(model="fake", served_id="fake", checkpoint=folder, settings=b"{}",
                       http=HttpSettings(port=int(port)))
code = run(options, worker_module="dgpp_core.testing.fake_worker", worker_arguments=("--script", script),
           timing=Timing(drain=3, notice=1, grace=1))
assert "torch" not in sys.modules
sys.exit(code)
"""
LONG = FakeScript(replies=(FakeReply(text="blue " * 2000),), step_ms=5)
REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "stream": True, "max_tokens": 4000}


@contextmanager
def started(folder: Path, scratch: Path, script: FakeScript) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the URL it gave with READY."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (scratch / "script").write_bytes(msgspec.json.encode(script))
    program = ("-c", textwrap.dedent(PROGRAM), str(folder), str(port), str(scratch / "script"))
    line = program_command(sys.executable, *program)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if script.load_ms:  # do not wait for it
                yield process, ""
                return
            assert select.select([process.stdout], [], [], 30)[0]
            ready = process.stdout.readline()
            assert ready.startswith("READY http://127.0.0.1:"), ready
            assert process.stdout.readline().strip().startswith("curl ")
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_serves_and_leaves_on_sigterm(checkpoint: Path, tmp_path: Path) -> None:
    with started(checkpoint, tmp_path, FakeScript()) as (process, url):
        for _ in range(20):
            assert httpx.post(url + "/v1/chat/completions", json=REQUEST).text.endswith("data: [DONE]\n\n")
        assert resident_mib(process.pid) <= 350
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_running_streams_end_with_an_error_object(checkpoint: Path, tmp_path: Path) -> None:
    with started(checkpoint, tmp_path, LONG) as (process, url):
        with httpx.stream("POST", url + "/v1/chat/completions", json=REQUEST, timeout=30) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            data = [line for line in lines if line.startswith("data: ")]
        assert '"code":"server_shutdown"' in data[-2]
        assert data[-1] == "data: [DONE]"
        assert process.wait(20) == 0


def test_second_signal_is_immediate(checkpoint: Path, tmp_path: Path) -> None:
    with (
        started(checkpoint, tmp_path, LONG) as (process, url),
        httpx.stream("POST", url + "/v1/chat/completions", json=REQUEST, timeout=30) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        *_, error, done = filter(None, lines)
        assert "server_shutdown" in error
        assert done == "data: [DONE]"
        assert process.wait(20) == 2
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_killed_engine_ends_the_service_with_its_reason(checkpoint: Path, tmp_path: Path) -> None:
    with started(checkpoint, tmp_path, FakeScript()) as (process, _):
        (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGKILL)
        assert process.wait(20) == 2
        assert process.stderr is not None
        assert "SIGKILL" in process.stderr.read()


def test_engine_goes_when_the_front_end_is_killed(checkpoint: Path, tmp_path: Path, wait_for: Any) -> None:
    with started(checkpoint, tmp_path, FakeScript()) as (process, _):
        (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait(20)
        wait_for(lambda: not Path(f"/proc/{engine}").exists() or _state(int(engine)) == "Z")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_signal_while_the_engine_loads(checkpoint: Path, tmp_path: Path, wait_for: Any) -> None:
    with started(checkpoint, tmp_path, FakeScript(load_ms=60_000)) as (process, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(lambda: bool(children.read_text()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_port_in_use(checkpoint: Path, tmp_path: Path) -> None:
    from dgpp_core.api.errors import ConfigError
    from dgpp_core.server.http import listen

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            listen("127.0.0.1", port)
    assert str(port) in raised.value.where
