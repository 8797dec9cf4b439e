"""A cluster of hosts on one machine, and `dgpp` on the first of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from dgpp_core.testing.namespaces import Hosts

COMMAND_S = 180.0


class Cluster:
    """Hosts, and `dgpp` on the first of them."""

    def __init__(self, net: Hosts, folder: Path, environ: dict[str, str]) -> None:
        self.net, self.folder, self.environ = net, folder, environ

    def dgpp(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        line = [*self.net.prefix(0), sys.executable, "-m", "dgpp_core.cli", *arguments]
        return subprocess.run(
            line, env={**self.environ, **environ}, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )

    def deployment(self, model: Path, world: int, **more: Any) -> Path:
        """A deployment file."""
        path = self.folder / f"world-{world}.json"
        engine = {"max_concurrency": 2, "kv_capacity": 1024, "model_alias": "tiny"}
        path.write_text(json.dumps({"model": str(model), "world_size": world, "engine": engine, **more}))
        return path

    def complete(self) -> str:
        """A greedy reply of the service on the first host."""
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        def ask() -> str:
            request = urllib.request.Request(
                "http://127.0.0.1:18080/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                text: str = json.load(response)["choices"][0]["text"]
                return text

        return self.net.inside(0, ask)

    def processes(self, host: int) -> list[str]:
        """What runs on a host beside the SSH server."""
        done = subprocess.run(["ip", "netns", "pids", self.net.names[host]], capture_output=True, text=True, check=True)
        found = []
        for pid in done.stdout.split():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line and not line.startswith("sshd") and "/sshd" not in line:
                    found.append(line)
        return found
