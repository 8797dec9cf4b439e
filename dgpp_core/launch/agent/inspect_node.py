"""What a node is, without changing anything on it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_PORT = 1


def facts(
    folders: list[str], ports: list[int], towards: list[str], program: list[str], environ: dict[str, str],
    checkpoint: str, root: str = "/",
) -> dict[str, Any]:  # fmt: skip
    """Everything that `dgpp_core.launch.checks` judges.

    Args:
        folders: that will be written to; they need not exist.
        ports: that must be free, on any address.
        towards: the other nodes.
        program: the command `dgpp`, with ``environ`` added to the environment.
        checkpoint: the folder of a checkpoint, or empty.
        root: of the file systems ``/proc`` and ``/sys``, for tests.
    """
    return {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()} {platform.release()}",
        "memory": _memory(Path(root)),
        "memlock": [_bytes(limit) for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)],
        "folders": {folder: _folder(os.path.expanduser(folder)) for folder in folders},
        "taken": [port for port in ports if not _free(port)],
        "ways": {node: _way(node, Path(root)) for node in towards},
        "rdma": rdma(root),
        "verbs": _loads("libibverbs.so.1"),
        "gpus": _gpus(),
        "program": _program([os.path.expanduser(word) for word in program], environ),
        "checkpoint": _checkpoint(Path(os.path.expanduser(checkpoint))) if checkpoint else "",
    }


def _memory(root: Path) -> dict[str, int]:
    """Bytes, by the names of ``/proc/meminfo``."""
    wanted = ("MemTotal", "MemFree", "MemAvailable", "Cached", "SwapTotal", "SwapFree")
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    return {name: fields.get(name, 0) for name in wanted}


def _bytes(limit: int) -> int:
    return -1 if limit == resource.RLIM_INFINITY else limit


def _folder(folder: str) -> dict[str, Any]:
    """Bytes free where a folder is or would be, and whether it can be written to."""
    place = Path(folder)
    while not place.exists():
        place = place.parent
    usable = place.is_dir() and os.access(str(place), os.W_OK | os.X_OK)
    return {"free": shutil.disk_usage(str(place)).free, "writable": usable}


def _free(port: int) -> bool:
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE or family == socket.AF_INET:  # a node may have no IPv6
                return False
    return True


def _way(node: str, root: Path) -> dict[str, Any]:
    """The address, interface, MTU (bytes) and speed (Mbit/s; 0 where it is not said) by which a node is reached."""
    address = ""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, there = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            address = str(probe.getsockname()[0])
    name = _interface_of(address) if address else ""
    return {
        "address": address,
        "interface": name,
        "mtu": _number(root / "sys/class/net" / name / "mtu") if name else 0,
        "speed": max(0, _number(root / "sys/class/net" / name / "speed")) if name else 0,
    }


def _interface_of(address: str) -> str:
    """The interface with an address, by ``ip``; empty where there is no such program."""
    try:
        line = ["ip", "-json", "address"]
        found = json.loads(subprocess.run(line, capture_output=True, check=True, timeout=5).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    names = [link["ifname"] for link in found for entry in link.get("addr_info", []) if entry.get("local") == address]
    return str(names[0]) if names else ""


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def rdma(root: str = "/") -> list[dict[str, Any]]:
    """The RDMA devices, with every address that is set."""
    place = Path(root) / "sys/class/infiniband"
    return [_device(path) for path in sorted(place.iterdir())] if place.is_dir() else []


def _device(path: Path) -> dict[str, Any]:
    port = path / "ports" / str(_PORT)
    gids = []
    entries = sorted((port / "gids").iterdir(), key=lambda entry: int(entry.name)) if (port / "gids").is_dir() else []
    for entry in entries:
        address, kind = _text(entry), _text(port / "gid_attrs/types" / entry.name)
        if kind and address.strip("0:"):
            gids.append({"index": int(entry.name), "kind": kind, "address": address})
    nets = sorted(each.name for each in (path / "device/net").iterdir()) if (path / "device/net").is_dir() else []
    return {
        "name": path.name,
        "state": _text(port / "state"),
        "layer": _text(port / "link_layer"),
        "rate": _text(port / "rate"),
        "gids": gids,
        "mtu": _number(path / "device/net" / nets[0] / "mtu") if nets else 0,
    }


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _gpus() -> list[str]:
    """Name and driver of each GPU, as ``nvidia-smi`` says; empty without one."""
    line = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, check=True, timeout=15)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.decode("utf-8", "replace").strip().splitlines()


def _program(line: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """What ``dgpp version --json`` prints, or ``problem``."""
    own = {name: os.path.expanduser(value) for name, value in environ.items()}
    try:
        done = subprocess.run(
            [*line, "version", "--json"], env={**os.environ, **own}, capture_output=True, check=True, timeout=20
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {error.returncode}"]
        return {"problem": last[-1]}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"problem": str(error)}
    return found


def _checkpoint(folder: Path) -> str:
    """What is missing of a checkpoint; empty for nothing."""
    if not (folder / "config.json").is_file():
        return f"no config.json in {folder}"
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        names = {"model.safetensors"}
    except (OSError, ValueError, KeyError) as error:
        return f"{index}: {error}"
    missing = sorted(name for name in names if not (folder / name).is_file())
    return f"{len(missing)} of {len(names)} files are missing: {chr(44).join(missing[:4])}" if missing else ""
