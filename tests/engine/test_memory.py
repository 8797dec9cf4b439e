"""Reading how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgpp_core.api import PlanError
from dgpp_core.engine.memory import LinuxMemory, check_floor


def machine(root: Path, available_kib: int, group: tuple[str, int, int] | None = None) -> LinuxMemory:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemFree: 5 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/status").write_text("Name: x\nVmRSS:\t  2048 kB\n")
    if group is not None:
        folder = root / "sys/fs/cgroup"
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(group[0] + "\n")
        (folder / "memory.current").write_text(f"{group[1]}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {group[2]}\n")
    return LinuxMemory(root)


def test_available_and_resident(tmp_path: Path) -> None:
    memory = machine(tmp_path, 1000)
    assert (memory.available(), memory.resident()) == (1000 * 1024, 2048 * 1024)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (("max", 0, 0), 1024000),
        (("500000", 200000, 50000), 350000),
        (("500000", 600000, 0), 0),
        (("9999999", 1, 0), 1024000),
    ],
)
def test_a_control_group_can_only_lower_it(tmp_path: Path, group: tuple[str, int, int], expected: int) -> None:
    assert machine(tmp_path, 1000, group).available() == expected


def test_this_machine_has_memory() -> None:
    memory = LinuxMemory()
    assert 0 < memory.resident() < memory.available() + memory.resident()


def test_a_system_that_does_not_say_is_an_error_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read") as caught:
        LinuxMemory(tmp_path).available()
    assert caught.value.where == str(tmp_path / "proc/meminfo")
    machine(tmp_path, 1)
    (tmp_path / "proc/meminfo").write_text("MemFree: 5 kB\n")
    with pytest.raises(PlanError) as caught:
        LinuxMemory(tmp_path).available()
    assert "MemAvailable" in caught.value.expected


def test_the_floor(tmp_path: Path) -> None:
    memory = machine(tmp_path, 1024)
    check_floor(memory, 1 << 20, "loading")
    with pytest.raises(PlanError, match="running out while loading weights") as caught:
        check_floor(memory, (1 << 20) + 1, "loading weights")
    assert caught.value.found == "1 MiB available"
