"""Processes of a node that outlive the connection that started them, and how they are known again.

A process is known by its id, its start time and the boot that both belong to. What it has started in turn carries a
mark in its environment. A signal goes through a descriptor of the process whose start time was read after opening it,
so it cannot reach another one that has taken over the number.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARK = "DGPP_START"
"""The variable whose value every process of one start of one rank has."""
_SIOCGIFADDR = 0x8915


def greet(towards: str) -> dict[str, Any]:
    """Who the node is.

    Args:
        towards: another node, or empty.

    Returns:
        ``home``; ``python``; ``time``, Unix time in seconds; ``address`` and ``interface`` from which ``towards`` is
        reached, empty where there is no way or no such name.
    """
    address = _address_towards(towards) if towards else ""
    return {
        "home": str(Path.home()),
        "python": sys.version.split()[0],
        "time": time.time(),
        "address": address,
        "interface": _interface_of(address),
    }


def is_here(node: str) -> bool:
    """Whether a host name or address is this host's own."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(node, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return True
    return False


def start(
    folder: str,
    record: str,
    log: str,
    line: list[str],
    environ: dict[str, str],
    without: list[str],
    files: dict[str, str],
    keep: int,
) -> int:
    """Start a process in a session of its own, its output into a file, and record it.

    Args:
        folder: working directory, made if need be; ``record`` and ``log`` are names of files in it.
        environ: added to the environment; has `MARK`.
        without: variables that are taken out of the environment first.
        files: written before, by name.
        keep: so many logs and fault files of earlier starts stay.

    Returns:
        The process id.
    """
    for name, text in files.items():
        write(folder, name, text)
    prune(folder, keep)
    kept = {name: value for name, value in os.environ.items() if name not in without}
    with open(Path(folder) / log, "ab") as output:
        process = subprocess.Popen(
            line, cwd=folder, env={**kept, **environ}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    seen = _seen(process.pid)
    known = {"pid": process.pid, "start": seen[1] if seen else "", "boot": boot(), "mark": environ[MARK]}
    try:
        write(folder, record, json.dumps(known))
    except OSError:
        process.kill()
        raise
    return process.pid


def follow(folder: str, record: str, log: str, offset: int, most: int) -> dict[str, Any]:
    """`state`, and then whole lines of `read_from`: what a process that is gone has said last is among them."""
    found = state(folder, record)
    return {**found, **read_from(folder, log, offset, most, whole_lines=True)}


def state(folder: str, record: str) -> dict[str, Any]:
    """What has become of a recorded process.

    Returns:
        ``state``: ``none`` (nothing recorded), ``running``, ``stopped`` (by a signal) or ``gone``; its ``pid``, or 0;
        ``others``, what it has started and what is left of that.
    """
    known = _read(folder, record)
    if known is None:
        return {"state": "none", "pid": 0, "others": []}
    letter = _letter(known)
    others = [pid for pid in _marked(known["mark"]) if pid != known["pid"]] if known["boot"] == boot() else []
    word = "gone" if letter is None else "stopped" if letter in "tT" else "running"
    return {"state": word, "pid": known["pid"], "others": others}


def tell(folder: str, record: str, number: int, everyone: bool) -> list[int]:
    """Send a signal to a recorded process, if it is still that one.

    Args:
        everyone: to what it has started, too.

    Returns:
        Who got it.
    """
    known = _read(folder, record)
    if known is None or known["boot"] != boot():
        return []
    told = [known["pid"]] if _signal(known["pid"], number, start_time=known["start"]) else []
    if everyone:
        others = [pid for pid in _marked(known["mark"]) if pid != known["pid"]]
        told += [pid for pid in others if _signal(pid, number, mark=known["mark"])]
    return told


def ask(folder: str, record: str) -> None:
    """Ask a recorded process to end in order; if it or what it has started is stopped, it goes on for that."""
    tell(folder, record, signal.SIGTERM, False)
    tell(folder, record, signal.SIGCONT, True)


def forget(folder: str, record: str) -> None:
    """Remove a record."""
    with contextlib.suppress(FileNotFoundError):
        (Path(folder) / record).unlink()


def write(folder: str, name: str, text: str) -> None:
    """Write a file as a whole; its folder is made if need be, for its owner alone. Nodes may share it."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = place / f".{name}.{socket.gethostname()}.{os.getpid()}"
    with open(fresh, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(place / name)


def prune(folder: str, keep: int) -> None:
    """Remove the oldest logs and fault files of earlier starts, so that ``keep`` of a kind stay."""
    for suffix in (".log", ".txt"):
        files = sorted(Path(folder).glob("rank*.epoch-*" + suffix), key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) - keep)]:
            file.unlink()


def read_from(folder: str, name: str, offset: int, most: int, whole_lines: bool = False) -> dict[str, Any]:
    """What a file has from ``offset`` on, or in its last ``most`` bytes where that is less.

    Args:
        whole_lines: leave what follows the last end of a line for the next time.

    Returns:
        ``text``, and ``offset`` after it; empty where there is no file.
    """
    try:
        with open(Path(folder) / name, "rb") as file:
            begin = max(offset, file.seek(0, os.SEEK_END) - most)
            file.seek(begin)
            raw = file.read()
    except FileNotFoundError:
        return {"text": "", "offset": 0}
    if whole_lines:
        raw = raw[: raw.rfind(b"\n") + 1]
    return {"text": raw.decode("utf-8", "replace"), "offset": begin + len(raw)}


def boot() -> str:
    """The identity of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _read(folder: str, record: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((Path(folder) / record).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def _letter(known: dict[str, Any]) -> str | None:
    """The kernel's letter for the process's state; None where it is gone."""
    seen = _seen(known["pid"])
    return seen[0] if seen and known["boot"] == boot() and seen[1] == known["start"] and seen[0] not in "ZX" else None


def _seen(pid: int) -> tuple[str, str] | None:
    """State and start time of a process, of ``/proc/PID/stat``; its name may hold anything, brackets too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and wanted in _environ(int(entry))]


def _environ(pid: int) -> list[bytes]:
    """A process's environment; empty where it is gone, a zombie or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _signal(pid: int, number: int, start_time: str = "", mark: str = "") -> bool:
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ESRCH:
            return False
        raise
    try:
        seen = _seen(pid)
        if seen is None or (start_time and seen[1] != start_time):
            return False
        if mark and f"{MARK}={mark}".encode() not in _environ(pid):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _address_towards(node: str) -> str:
    """This host's address on the way to ``node``; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    """The network interface that has an address."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((line[5] for line in lines if line[0] == wanted), "")
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""
