"""Hosts of `dgpp_core.testing.namespaces` with an SSH server on each, and keys made for the occasion."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from dgpp_core.testing import namespaces
from dgpp_core.testing.namespaces import Hosts, hosts

SERVER = "/usr/sbin/sshd"
START_S = 20.0


def unavailable() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
        return "hosts to log in to need the OpenSSH server"
    return namespaces.unavailable()


@contextlib.contextmanager
def ssh_hosts(count: int, folder: Path, *, ipv6: bool = False) -> Iterator[tuple[Hosts, Path]]:
    """Hosts and a configuration file for ``ssh`` that opens them; whatever runs on them ends with the block.

    Args:
        folder: for keys and configuration.
        ipv6: they have addresses of that family alone.
    """
    with hosts(count, ipv6=ipv6) as net, contextlib.ExitStack() as stack:
        stack.callback(end_all, net)
        config = _write_files(net, count, folder)
        for host in range(count):
            line = [*net.prefix(host), SERVER, "-D", "-e", "-f", str(folder / "sshd_config")]
            stack.enter_context(_ended(subprocess.Popen(line, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)))
        for host in range(count):
            net.inside(0, lambda host=host: _await_port(net.address(host)))  # type: ignore[misc]
        yield net, config


def end_all(net: Hosts) -> None:
    """Kill every process that is on the hosts."""
    for name in net.names:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _ended(server: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        server.kill()
        server.wait()


def _write_files(net: Hosts, count: int, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    server = [
        f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/user.pub", "StrictModes no", "UsePAM no",
        "PidFile none", "PasswordAuthentication no", "PermitRootLogin prohibit-password", "MaxStartups 100",
    ]  # fmt: skip
    (folder / "sshd_config").write_text("\n".join(server) + "\n")
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    known = [f"{net.address(host)} {key}\n" for host in range(count)]
    (folder / "known_hosts").write_text("".join(known))
    client = [
        "Host *", f"IdentityFile {folder}/user", "IdentitiesOnly yes", f"UserKnownHostsFile {folder}/known_hosts",
        "GlobalKnownHostsFile none", "StrictHostKeyChecking yes",
    ]  # fmt: skip
    (folder / "ssh_config").write_text("\n".join(client) + "\n")
    return folder / "ssh_config"


def _await_port(address: str) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((address, 22), 1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return
