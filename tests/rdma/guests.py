"""Machines with RDMA verbs, where there are none: Debian's kernel in QEMU, with Soft-RoCE on a virtual network card.

A guest's root is this machine's own, shared read-only, so a program finds the same checkout and the same Python there.
There is no image to build, and neither KVM nor a kernel module of the host is wanted. The kernel's package is fetched
once and kept with an archive of the modules in the user's cache, 72 MB.
"""

from __future__ import annotations

import lzma
import os
import re
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

TOOLS = ("qemu-system-x86_64", "busybox", "depmod", "xz", "dpkg-deb", "apt-get", "apt-cache")
PACKAGES = "qemu-system-x86 busybox-static kmod iproute2 rdma-core ibverbs-providers libibverbs-dev python3-pyverbs"
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgpp" / "rdma_guest"
HERE = Path(__file__).parent
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "crc32_generic", "crc32c_generic", "rdma_rxe", "rdma_ucm")
"""With what they depend on; rdma_rxe asks for a checksum by a name that depmod does not know."""


def missing() -> str:
    """Why there can be no guests here; empty if there can."""
    if tools := [name for name in TOOLS if shutil.which(name) is None]:
        return f"no {', '.join(tools)} here; on Debian: apt-get install {PACKAGES}"
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any(tag in path.name for path in PYVERBS.glob("device.*")):
        return f"no pyverbs for this version of Python at {PYVERBS}; on Debian: apt-get install python3-pyverbs"
    return ""


def build(cache: Path = CACHE) -> str:
    """Have a kernel and an initial file system in the cache; why that cannot be, or nothing."""
    if (cache / "initial").exists():
        return ""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            root = _kernel_package(Path(folder))
        except subprocess.SubprocessError as error:
            return f"the kernel's package cannot be fetched: {error}"
        image = next((root / "boot").glob("vmlinuz-*"))
        kernel, initial = Path(folder) / "kernel", Path(folder) / "initial"
        kernel.write_bytes(_uncompressed(image.read_bytes()))
        initial.write_bytes(_archive(root, image.name.removeprefix("vmlinuz-")))
        kernel.replace(cache / "kernel")
        initial.replace(cache / "initial")
    return ""


def _kernel_package(folder: Path) -> Path:
    """The unpacked files of the distribution's kernel."""
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    name = re.search(r"Depends: (linux-image-\S+)", depends)
    if name is None:
        raise subprocess.SubprocessError("apt knows no linux-image-amd64; apt-get update?")
    subprocess.run(["apt-get", "download", "-q", name[1]], cwd=folder, check=True, capture_output=True, timeout=300)
    root = folder / "root"
    subprocess.run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), str(root)], check=True, timeout=120)
    if not (root / "lib" / "modules").exists():  # where /lib is a link to /usr/lib
        (root / "lib").mkdir(exist_ok=True)
        (root / "lib" / "modules").symlink_to(root / "usr" / "lib" / "modules")
    return root


def _uncompressed(image: bytes) -> bytes:
    """The kernel in a bzImage, so that a slow guest need not unpack it; the image itself where it is not xz."""
    start = ((image[0x1F1] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[start + offset : start + offset + length]
    if not payload.startswith(b"\xfd7zXZ"):
        return image
    done = subprocess.run(["xz", "-dc"], input=payload, capture_output=True, check=False, timeout=60)
    return done.stdout if done.stdout.startswith(b"\x7fELF") else image


def _modules(root: Path, release: str) -> list[Path]:
    """The modules' files in an order in which they load."""
    base = root / "lib" / "modules" / release
    if not (base / "modules.dep").exists():
        subprocess.run(["depmod", "-b", str(root), release], check=True, timeout=60)
    needs = dict(line.split(":", 1) for line in (base / "modules.dep").read_text().splitlines())
    paths = {re.sub(r"\.ko.*", "", Path(path).name).replace("-", "_"): path for path in needs}
    wanted = [paths[name] for name in MODULES if name in paths]  # what is missing is part of the kernel
    order = [path for module in wanted for path in [*reversed(needs[module].split()), module]]
    return [base / path for path in dict.fromkeys(order)]


def _archive(root: Path, release: str) -> bytes:
    """An initial file system (cpio, "newc"): busybox, the modules, and `init.sh`."""
    busybox = shutil.which("busybox")
    assert busybox is not None, "among the tools"
    entries: list[tuple[str, int, bytes]] = [
        *((name, stat.S_IFDIR | 0o755, b"") for name in ("bin", "dev", "proc", "sys", "modules", "host")),
        ("bin/busybox", stat.S_IFREG | 0o755, Path(busybox).read_bytes()),
        ("init", stat.S_IFREG | 0o755, (HERE / "init.sh").read_bytes()),
    ]
    names = []
    for path in _modules(root, release):
        content = path.read_bytes()
        names.append(re.sub(r"\.ko.*", ".ko", path.name))
        content = lzma.decompress(content) if path.suffix == ".xz" else content
        entries.append((f"modules/{names[-1]}", stat.S_IFREG | 0o644, content))
    entries += [("modules/order", stat.S_IFREG | 0o644, ("\n".join(names) + "\n").encode()), ("TRAILER!!!", 0, b"")]
    archive = bytearray()
    for number, (name, mode, content) in enumerate(entries, 1):
        raw = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(raw), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields) + raw
        archive += bytes(-len(archive) % 4) + content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


class Outcome(msgspec.Struct, frozen=True):
    """What became of one guest's program.

    Attributes:
        status: the program's exit status; None if the guest ended without one or was stopped at the time limit.
        output: what it printed.
        folder: what it wrote to /run/out.
    """

    status: int | None
    output: str
    folder: Path


def address(node: int) -> str:
    """A guest's address."""
    return f"10.77.0.{node + 1}"


def run(
    program: Sequence[str],
    folder: Path,
    *,
    nodes: int = 1,
    mtu: Sequence[int] = (),
    extra: str = "",
    timeout: float = 600.0,
    cache: Path = CACHE,
) -> list[Outcome]:
    """Run a Python program in each of some guests on one network, the node's number as its last argument.

    Args:
        folder: for what they leave behind.
        mtu: of each guest's card; 4200, which gives verbs 4096, where none is said.
        extra: shell commands before the program; ``$card`` and ``$address`` are the network card's.
        timeout: seconds for all of it.
    """
    (folder / "path").mkdir(parents=True)
    (folder / "path" / "pyverbs").symlink_to(PYVERBS)
    guests = []
    end = time.monotonic() + timeout
    try:
        for node in range(nodes):
            size = mtu[node] if mtu else 4200
            guests.append(_Guest(node, nodes, program, folder, f"ip link set $card mtu {size} up", extra, cache))
        while any(guest.process.poll() is None for guest in guests) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for guest in guests:
            guest.stop()
    return [guest.outcome() for guest in guests]


class _Guest:
    """One machine. Node 0 is a hub that the others' cables, Unix sockets, are plugged into."""

    def __init__(
        self, node: int, nodes: int, program: Sequence[str], folder: Path, setup: str, later: str, cache: Path
    ) -> None:
        self._out = folder / f"node{node}"
        self._out.mkdir()
        (self._out / "setup").write_text(f"address={address(node)}/24\n{setup}\nip addr add $address dev $card\n")
        (self._out / "later").write_text(f"{later}\n")
        variables = {
            "HOME": "/run/home",
            "TMPDIR": "/run/tmp",
            "XDG_CACHE_HOME": str(CACHE.parents[1]),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{folder / 'path'}:{HERE.parents[1]}:{HERE.parent / 'bus'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        command = ["env", "-i", *(f"{k}={v}" for k, v in variables.items()), sys.executable, *program, str(node)]
        (self._out / "program").write_text(shlex.join(command) + "\n")
        self._output = b""
        self.process = subprocess.Popen(
            [*self._machine(cache), *self._network(node, nodes, folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _machine(self, cache: Path) -> list[str]:
        return [
            "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-machine", "q35", "-cpu", "max", "-accel", "tcg,thread=multi", "-smp", "1", "-m", "1024",
            "-kernel", str(cache / "kernel"), "-initrd", str(cache / "initial"),
            "-append", "console=ttyS0 quiet panic=-1 tsc=reliable no_timer_check mitigations=off random.trust_cpu=on",
            "-serial", f"file:{self._out / 'console'}",
            "-chardev", "stdio,id=program,signal=off", "-serial", "chardev:program",
            "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
            "-fsdev", f"local,id=out,path={self._out},security_model=none",
            "-device", "virtio-9p-pci,fsdev=out,mount_tag=out",
            "-object", "rng-random,id=random,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=random",
        ]  # fmt: skip

    def _network(self, node: int, nodes: int, folder: Path) -> list[str]:
        card = ["-device", f"virtio-net-pci,netdev=card,mac=52:54:00:77:00:{node + 1:02x},romfile="]
        if node:
            cable, end = folder / f"cable{node}", time.monotonic() + 10
            while not cable.exists() and time.monotonic() < end:
                time.sleep(0.02)
            return ["-netdev", f"stream,id=card,server=off,addr.type=unix,addr.path={cable}", *card]
        hub = ["-netdev", "hubport,id=card,hubid=0"]
        for other in range(1, nodes):
            plug = f"stream,id=cable{other},server=on,addr.type=unix,addr.path={folder / f'cable{other}'}"
            hub += ["-netdev", plug, "-netdev", f"hubport,id=plug{other},hubid=0,netdev=cable{other}"]
        return [*hub, *card]

    def _read(self) -> None:
        assert self.process.stdout is not None, "a pipe"
        self._output = self.process.stdout.read()

    def stop(self) -> None:
        """End the machine, if it has not ended by itself."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def outcome(self) -> Outcome:
        """After `stop`."""
        status, console = self._out / "status", self._out / "console"
        text = self._output.decode(errors="replace").replace("\r\n", "\n")
        if status.exists() and status.read_text().strip():
            return Outcome(int(status.read_text()), text, self._out)
        return Outcome(None, text + console.read_text(errors="replace")[-3000:], self._out)
