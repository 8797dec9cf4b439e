"""Services in processes of their own: started until they say READY, ended with the block."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.host.child import module_command

_READY = "READY "


class RunningService(msgspec.Struct, frozen=True):
    """A service that has said READY: its address without a path, and its process."""

    url: str
    process: subprocess.Popen[str]

    def processes(self) -> list[int]:
        """The process and all it has started, directly or not."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(FileNotFoundError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def resident_mib(self) -> float:
        """Memory of all of these, MiB; what several share counts once in each."""
        pages = 0
        for pid in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextlib.contextmanager
def started(line: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[RunningService]:
    """Start a service with a command that prints ``READY URL`` and serves until SIGTERM.

    Args:
        environ: added to this process's environment.

    Raises:
        EngineError: it ended before it was ready.
    """
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(environ or {})}
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said.startswith(_READY):
                process.wait()
                log.seek(0)
                raise EngineError("the service ended before it was ready", found=log.read()[-2000:])
            yield RunningService(said.split()[1].removesuffix("/v1"), process)
        finally:
            process.terminate()


def serve_command(plugin: str, *options: str) -> list[str]:
    """``dgpp serve`` of a model on a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return module_command("dgpp_core.cli", "serve", "--plugin", plugin, "--port", str(port), *options)
