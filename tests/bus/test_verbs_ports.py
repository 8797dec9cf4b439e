"""Devices and addresses as the kernel shows them, and offers of ranks that do not fit together; no device is needed."""

from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path

import pytest

from dgpp_core.api import EngineError
from dgpp_core.bus.forming import Terms
from dgpp_core.bus.verbs.join import join
from dgpp_core.bus.verbs.ports import SYSFS, Gid, gids, rails

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe77:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
GLOBAL = "fd00:0000:0000:0000:0000:0000:0000:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
Entry = tuple[str, str | None]


def device(
    root: Path, name: str, entries: list[Entry], state: str = "4: ACTIVE", layer: str = "Ethernet", rate: str = ""
) -> None:
    """One device's part of sysfs. An entry without a type has a file that cannot be read, as a hole has."""
    port = root / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(layer + "\n")
    if rate:
        (port / "rate").write_text(rate + "\n")
    for index, (address, kind) in enumerate(entries):
        (port / "gids" / str(index)).write_text(address + "\n")
        type_file = port / "gid_attrs" / "types" / str(index)
        type_file.write_text(kind + "\n") if kind else type_file.mkdir()


V1, V2 = "IB/RoCE v1", "RoCE v2"


@pytest.mark.parametrize(
    ("entries", "index"),
    [
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (MAPPED, V1), (MAPPED, V2)], 3),
        ([(LINK_LOCAL, V2), (EMPTY, None), (EMPTY, None), (EMPTY, V2), (MAPPED, V1), (MAPPED, V2)], 5),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2)], 1),
        ([(GLOBAL, V2), (MAPPED, V2)], 0),
        ([(EMPTY, None)] * 9 + [(LINK_LOCAL, V2), (MAPPED, V2)], 10),
    ],
)
def test_the_first_address_of_the_newer_kind_that_is_not_link_local(
    tmp_path: Path, entries: list[Entry], index: int
) -> None:
    device(tmp_path, "mlx5_0", entries)
    assert [rail.gid.index for rail in rails(root=tmp_path)] == [index]


def test_a_table_is_read_in_order_of_its_numbers_without_its_holes(tmp_path: Path) -> None:
    device(tmp_path, "rxe0", [(EMPTY, V2), (LINK_LOCAL, V2)] + [(EMPTY, None)] * 8 + [(MAPPED, V2)])
    found = gids(tmp_path / "rxe0")
    assert found == [Gid(1, V2, IPv6Address(LINK_LOCAL)), Gid(10, V2, IPv6Address(MAPPED))]
    assert [gid.family for gid in found] == ["IPv6", "IPv4"]


def test_an_index_that_is_given_is_taken_or_refused(tmp_path: Path) -> None:
    device(tmp_path, "rxe0", [(LINK_LOCAL, V2), (MAPPED, V1), (MAPPED, V2)])
    assert rails(["rxe0"], [0], tmp_path)[0].gid.address == IPv6Address(LINK_LOCAL)
    for index in (1, 7):
        with pytest.raises(EngineError, match="no address to use") as refused:
            rails(["rxe0"], [index], tmp_path)
        assert refused.value.expected == f"RoCE v2 at index {index}"
        assert "1: IB/RoCE v1 ::ffff:" in refused.value.found


def test_devices_are_all_active_ones_by_name_or_those_that_are_named(tmp_path: Path) -> None:
    entries: list[Entry] = [(MAPPED, V2)]
    device(tmp_path, "rocep1s0f1", entries, state="1: DOWN")
    device(tmp_path, "rocep1s0f0", entries, rate="100 Gb/sec (2X HDR)")
    device(tmp_path, "roceP2p1s0f0", entries, rate="odd")
    device(tmp_path, "ibp9", entries, layer="InfiniBand")
    (tmp_path / "empty").mkdir()
    assert [(rail.device, rail.gbps) for rail in rails(root=tmp_path)] == [("roceP2p1s0f0", 0), ("rocep1s0f0", 100)]
    named = rails(["rocep1s0f0", "roceP2p1s0f0"], (), tmp_path)
    assert [rail.device for rail in named] == ["rocep1s0f0", "roceP2p1s0f0"]
    for name, found in {
        "rocep1s0f1": "its port is 1: DOWN",
        "ibp9": "its link layer is InfiniBand",
        "empty": "No such file or directory",
        "mlx5_0": "empty, ibp9, roceP2p1s0f0, rocep1s0f0, rocep1s0f1",
    }.items():
        with pytest.raises(EngineError, match="cannot be used") as refused:
            rails([name], (), tmp_path)
        assert (refused.value.where, refused.value.found) == (name, found)


def test_without_a_device_it_is_said_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no active RDMA device") as refused:
        rails(root=tmp_path / "nowhere")
    assert refused.value.found == "none"
    device(tmp_path, "mlx5_0", [], state="1: DOWN")
    with pytest.raises(EngineError, match="no active RDMA device") as refused:
        rails(root=tmp_path)
    assert refused.value.found == "mlx5_0: its port is 1: DOWN"


def test_a_device_without_an_address_is_refused(tmp_path: Path) -> None:
    device(tmp_path, "rxe0", [(LINK_LOCAL, V1), (EMPTY, V2)])
    with pytest.raises(EngineError, match="no address to use") as refused:
        rails(root=tmp_path)
    assert refused.value.hint == "give the network card an IPv4 address"


@pytest.mark.skipif(SYSFS.is_dir() and any(SYSFS.iterdir()), reason="there are RDMA devices here")
def test_joining_without_a_device_is_refused_before_anybody_is_waited_for() -> None:
    with pytest.raises(EngineError, match="no active RDMA device"):
        join(Terms(rank=0, world=2, address="127.0.0.1:0"))
