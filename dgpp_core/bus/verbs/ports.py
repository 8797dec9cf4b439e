"""Which RDMA devices a rank uses and by which address, as the kernel tells it in sysfs. Needs no torch, no pyverbs.

A GID is one of the addresses of a port. Its index is not stable across boots, and the table may have holes, so both are
read at every start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from ipaddress import IPv6Address
from pathlib import Path

import msgspec

from dgpp_core.api.errors import EngineError

SYSFS = Path("/sys/class/infiniband")
PORT = 1
ROCE_V2 = "RoCE v2"


class Gid(msgspec.Struct, frozen=True):
    """One address of a port."""

    index: int
    kind: str
    address: IPv6Address

    @property
    def family(self) -> str:
        """``IPv4`` for a mapped address, else ``IPv6``."""
        return "IPv4" if self.address.ipv4_mapped else "IPv6"


class Rail(msgspec.Struct, frozen=True):
    """A device and the address that it is used by.

    Attributes:
        gbps: the port's rate, 10^9 bits a second; 0 where the kernel does not say.
    """

    device: str
    gid: Gid
    gbps: float


def rails(devices: Sequence[str] = (), indices: Sequence[int] = (), root: Path = SYSFS) -> list[Rail]:
    """The devices to use, in the order that ranks number their lanes.

    Args:
        devices: names, in an order that is the same on every rank; none takes all active Ethernet ones by name.
        indices: of the GIDs, one for each of ``devices``; none chooses them.
        root: of the tree that the kernel shows.

    Raises:
        EngineError: there is no such device, it is not active, or it has no such address; says what is there.
    """
    there = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    active = [name for name in there if not _inactive(root / name)]
    chosen = list(devices) or active
    if not chosen:
        found = "; ".join(f"{name}: {_inactive(root / name)}" for name in there) or "none"
        hint = "load the driver, plug the cable, or use another transport"
        raise EngineError("there is no active RDMA device", where=str(root), found=found, hint=hint)
    for name in chosen:
        if name not in active:
            found = _inactive(root / name) if name in there else f"{', '.join(there) or 'none'}"
            raise EngineError(
                "an RDMA device cannot be used", where=name, found=found, expected="an active Ethernet port"
            )
    given = dict(zip(chosen, indices, strict=True)) if indices else {}
    return [Rail(name, choose(name, gids(root / name), given.get(name)), _rate(root / name)) for name in chosen]


def gids(device: Path) -> list[Gid]:
    """The addresses of a device's port, in order of index; what is empty or cannot be read is left out."""
    folder = device / "ports" / str(PORT)
    found = []
    for path in sorted((folder / "gids").iterdir(), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, ValueError):  # an entry without a type gives an error when it is read
            address = IPv6Address(path.read_text().strip())
            kind = (folder / "gid_attrs" / "types" / path.name).read_text().strip()
            if int(address):
                found.append(Gid(int(path.name), kind, address))
    return found


def choose(device: str, there: Sequence[Gid], index: int | None = None) -> Gid:
    """The GID to use: that of ``index``, else the first of RoCE v2 that is not link-local, else the first of RoCE v2.

    A link-local one connects, and then loses what is sent between some pairs of nodes.

    Raises:
        EngineError: there is none, or none of this index and type; lists what is there.
    """
    usable = [gid for gid in there if gid.kind == ROCE_V2 and index in (None, gid.index)]
    if not usable:
        found = "; ".join(f"{gid.index}: {gid.kind} {gid.address}" for gid in there) or "no address"
        wanted = f"{ROCE_V2} at index {index}" if index is not None else ROCE_V2
        hint = "give the network card an IPv4 address" if index is None else "leave DGPP_ROCE_GID_INDICES empty"
        raise EngineError("an RDMA device has no address to use", where=device, found=found, expected=wanted, hint=hint)
    return next((gid for gid in usable if not gid.address.is_link_local), usable[0])


def _inactive(device: Path) -> str:
    """Why a device cannot be used; empty if it can."""
    port = device / "ports" / str(PORT)
    try:
        state, layer = ((port / name).read_text().strip() for name in ("state", "link_layer"))
    except OSError as error:
        return error.strerror or "no port"
    if layer != "Ethernet":
        return f"its link layer is {layer}"
    return "" if state.startswith("4") else f"its port is {state}"


def _rate(device: Path) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float((device / "ports" / str(PORT) / "rate").read_text().split()[0])
    return 0.0
