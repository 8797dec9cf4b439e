"""What `dgpp doctor` knows of a node."""

from __future__ import annotations

import msgspec


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, under the kernel's names."""

    total: int = msgspec.field(name="MemTotal")
    free: int = msgspec.field(name="MemFree")
    available: int = msgspec.field(name="MemAvailable")
    cached: int = msgspec.field(name="Cached")
    swap: int = msgspec.field(name="SwapTotal")
    swap_free: int = msgspec.field(name="SwapFree")


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes free where it is or would be, and whether it can be written to."""

    free: int
    writable: bool


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How a node reaches another: its own address, interface, MTU in bytes, speed in Mbit/s (0: not said)."""

    address: str
    interface: str
    mtu: int
    speed: int


class GidEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An address of an RDMA device."""

    index: int
    kind: str
    address: str


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device's first port; ``mtu`` is its network interface's, 0 for none."""

    name: str
    state: str
    layer: str
    rate: str
    gids: tuple[GidEntry, ...]
    mtu: int

    @property
    def active(self) -> bool:
        """Whether it can be used."""
        return self.layer == "Ethernet" and self.state.startswith("4")

    @property
    def gbps(self) -> float:
        """Its rate, 10^9 bits a second; 0 where the kernel does not say."""
        word = (self.rate.split() or [""])[0]
        return float(word) if word.replace(".", "", 1).isdigit() else 0.0


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """What ``dgpp version`` says on the node, or why it says nothing."""

    problem: str = ""
    dgpp_core: str = ""
    python: str = ""
    plugins: dict[str, str] = {}
    libraries: dict[str, str | None] = {}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A node.

    Attributes:
        memlock: soft and hard limit in bytes, -1 for none.
        taken: ports that are not free, of those that should be.
        ways: to the other nodes, by name.
        verbs: whether libibverbs is installed.
        checkpoint: what is missing of it; empty for nothing, or where none was asked for.
    """

    python: str
    system: str
    memory: Memory
    memlock: tuple[int, int]
    folders: dict[str, Folder]
    taken: tuple[int, ...]
    ways: dict[str, Way]
    rdma: tuple[RdmaDevice, ...]
    verbs: bool
    gpus: tuple[str, ...]
    program: Software
    checkpoint: str


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was looked at.

    Attributes:
        facts: None where it does not answer; ``problem`` says why.
        time: of its clock, Unix time in seconds; ``before`` and ``after`` are this host's around that moment.
    """

    node: str
    facts: Facts | None = None
    problem: str = ""
    hint: str = ""
    time: float = 0.0
    before: float = 0.0
    after: float = 0.0
