"""How much memory there is and how much this process takes. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dgpp_core.api.errors import PlanError


class MemoryReader(Protocol):
    """Where the memory plan's figures come from; an argument, so that tests can have any machine."""

    def available(self) -> int:
        """Bytes that can be allocated without swapping."""
        ...

    def resident(self) -> int:
        """Bytes of this process's resident set."""
        ...


class LinuxMemory:
    """MemAvailable of /proc/meminfo, or what a control group leaves where that is less.

    MemFree is not used: page cache is reclaimable.

    Args:
        root: the file system to read, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def available(self) -> int:
        """Bytes; raises `PlanError` where the system does not say."""
        return min([self._field("proc/meminfo", "MemAvailable"), *self._group_limit()])

    def resident(self) -> int:
        """Bytes; raises `PlanError` where the system does not say."""
        return self._field("proc/self/status", "VmRSS")

    def _field(self, path: str, name: str) -> int:
        file = self._root / path
        try:
            for line in file.read_text().splitlines():
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError) as error:
            raise PlanError("cannot read how much memory there is", where=str(file), found=str(error)) from None
        raise PlanError("cannot read how much memory there is", where=str(file), expected=f"a line {name}: N kB")

    def _group_limit(self) -> list[int]:
        """What a version 2 control group leaves, its own reclaimable file pages counted as free; empty without one."""
        group = self._root / "sys/fs/cgroup"
        try:
            limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return []
        return [] if limit == "max" else [max(0, int(limit) - used + int(stat.get("inactive_file", 0)))]


def check_floor(memory: MemoryReader, floor: int, doing: str) -> None:
    """Stop before the machine starts to swap.

    Args:
        floor: bytes that must stay available.
        doing: what is being filled, for the error.

    Raises:
        PlanError: less than ``floor`` is available.
    """
    if (available := memory.available()) < floor:
        raise PlanError(
            f"memory is running out while {doing}",
            found=f"{available / 2**20:.0f} MiB available",
            expected=f"at least {floor / 2**20:.0f} MiB",
            hint="another process has taken memory since the plan was made: stop it, or lower kv_capacity",
        )
