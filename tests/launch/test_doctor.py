"""The doctor: facts from fake systems, and each judgement with what was found and what to do."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.bus.loopback import LoopbackBus, LoopbackWorld
from dgpp_core.checkpoint.package import converted_folder
from dgpp_core.cli.main import cli
from dgpp_core.host.loading import load_plugins
from dgpp_core.launch.agent import inspect_node
from dgpp_core.launch.checks import GIB, Check, Wanted, judge
from dgpp_core.launch.doctor import timings
from dgpp_core.launch.exchange import measure
from dgpp_core.launch.exchange_terms import Timing, expected_us
from dgpp_core.launch.facts import Facts, Seen
from dgpp_core.testing.ssh_cluster import Cluster
from dgpp_core.testing.ssh_hosts import unavailable

MEMINFO = """MemTotal:       125829120 kB
MemFree:          2097152 kB
MemAvailable:   104857600 kB
Cached:          99614720 kB
SwapTotal:       16777216 kB
SwapFree:        16777216 kB
HugePages_Total:       0
"""
V4, V6, LOCAL = "0000:0000:0000:0000:0000:ffff:c0a8:6401", "2001:db8::1", "fe80:0000:0000:0000:0000:0000:0000:0001"


def device(root: Path, name: str, gids: dict[int, tuple[str, str]], state: str = "4: ACTIVE", mtu: int = 9000) -> None:
    """A device as sysfs shows it: an entry of the table that is empty has zeros and no readable type."""
    path = root / "sys/class/infiniband" / name
    port = path / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    for index in range(8):
        address, kind = gids.get(index, ("0000:0000:0000:0000:0000:0000:0000:0000", ""))
        (port / "gids" / str(index)).write_text(address + "\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
    for file, text in (("state", state), ("link_layer", "Ethernet"), ("rate", "200 Gb/sec (4X HDR)")):
        (port / file).write_text(text + "\n")
    net = path / "device/net/enp1"
    net.mkdir(parents=True)
    (net / "mtu").write_text(f"{mtu}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with memory."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def facts(root: Path, **more: Any) -> Facts:
    """Of a node with this root, whose software works."""
    program = [sys.executable, "-c", 'print(\'{"dgpp_core": "0.1.0", "libraries": {"torch": "2.11"}}\')']
    given: dict[str, Any] = {"folders": [str(root)], "ports": [], "towards": [], "program": program, "environ": {},
                             "checkpoint": "", "root": str(root)} | more  # fmt: skip
    return msgspec.convert(json.loads(json.dumps(inspect_node.facts(**given))), Facts)


def judged(one: Facts, wanted: Wanted | None = None) -> dict[str, Check]:
    return {check.what: check for check in judge([Seen(node="a", facts=one)], wanted or Wanted())}


def test_page_cache_is_not_used_memory(root: Path) -> None:
    check = judged(facts(root), Wanted(memory=90 * GIB))["memory"]
    assert check.level == "ok"
    assert check.found == "100.0 GiB available of 120.0 (95.0 GiB of page cache can be had back)"
    short = judged(facts(root), Wanted(memory=110 * GIB))["memory"]
    assert (short.level, short.expected) == ("fault", "at least 110.0 GiB available")
    assert "kv_capacity" in short.next


@pytest.mark.parametrize(
    ("gids", "level", "found"),
    [
        ({0: (LOCAL, "RoCE v2"), 4: (V4, "RoCE v2")}, "ok", "GID 4 (RoCE v2, 192.168.100.1), holes at 1, 2, 3"),
        ({0: (LOCAL, "IB/RoCE v1"), 1: (LOCAL, "RoCE v2"), 2: (V4, "IB/RoCE v1"), 3: (V4, "RoCE v2")}, "ok", "GID 3"),
        ({0: (LOCAL, "RoCE v2")}, "warning", "GID 0 (RoCE v2, fe80::1)"),
    ],
)
def test_an_address_is_chosen_as_a_rank_would_and_holes_are_shown(
    root: Path, gids: dict[int, tuple[str, str]], level: str, found: str
) -> None:
    device(root, "roce0", gids)
    check = judged(facts(root))["RDMA"]
    assert check.level == level
    assert found in check.found
    assert "200 Gbit/s" in check.found


def test_a_pinned_index_that_moved_is_a_fault_with_the_table(root: Path) -> None:
    device(root, "roce0", {4: (V4, "RoCE v2")})
    wanted = Wanted(devices={"a": ("roce0",)}, gid_indices={"a": (3,)}, rdma=True)
    check = judged(facts(root), wanted)["RDMA GID"]
    assert check.level == "fault"
    assert "4: RoCE v2" in check.found
    assert check.expected == "RoCE v2 at index 3"


@pytest.mark.parametrize(
    ("state", "mtu", "what", "level"),
    [("1: DOWN", 9000, "RDMA", "warning"), ("4: ACTIVE", 1500, "RDMA MTU", "warning")],
)
def test_a_port_that_is_down_or_has_small_packets_is_told(
    root: Path, state: str, mtu: int, what: str, level: str
) -> None:
    device(root, "roce0", {3: (V4, "RoCE v2")}, state=state, mtu=mtu)
    check = judged(facts(root))[what]
    assert check.level == level
    assert check.next


def test_rdma_that_the_site_names_and_that_is_not_there_is_a_fault(root: Path) -> None:
    found = judged(facts(root), Wanted(devices={"a": ("roce0",)}, rdma=True))
    assert found["RDMA"].level == "fault"
    assert "RDMA" not in {check.what for check in judged(facts(root)).values() if check.level != "ok"}


def test_software_that_does_not_run_and_a_checkpoint_with_a_hole_are_told(root: Path) -> None:
    broken = facts(root, program=[sys.executable, "-c", "import no_such_module"])
    assert "No module named 'no_such_module'" in judged(broken)["software"].found
    (root / "m").mkdir()
    (root / "m/config.json").write_text("{}")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (root / "m/model.safetensors.index.json").write_text(json.dumps(index))
    (root / "m/model-1.safetensors").touch()
    check = judged(facts(root, checkpoint=str(root / "m")))["checkpoint"]
    assert (check.level, check.found) == ("fault", "1 of 2 files are missing: model-2.safetensors")
    (root / "m/model-2.safetensors").touch()
    whole = judged(facts(root, checkpoint=str(root / "m")), Wanted(checkpoints={"a": "m"}))["checkpoint"]
    assert (whole.level, whole.found) == ("ok", "m")


@pytest.mark.usefixtures("unsettled")
def test_a_deployment_is_looked_for_where_serve_looks_and_what_is_not_known_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HUB_CACHE", "DGPP_LOG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def told(*line: str) -> dict[str, dict[str, str]]:
        rows = CliRunner().invoke(cli, ["doctor", *line, "--json"])
        said = CliRunner().invoke(cli, ["doctor", *line])
        assert (rows.exit_code, said.exit_code, said.stderr) == (0, 0, ""), rows.stderr + said.stderr
        *lines, last = said.stdout.splitlines()
        warnings = sum(line.startswith("WARN ") for line in lines)
        assert last == f"0 faults, {warnings} warning{'s' if warnings != 1 else ''}"
        return {row["what"]: row for row in json.loads(rows.stdout)}

    assert told()["deployment"]["level"] == "warning"
    spec = load_plugins(environ=os.environ).model("smollm2").spec
    (tmp_path / "d.json").write_text(json.dumps({"model": spec.repository, "world_size": 1}))
    rows = told("--config", "d.json")
    assert rows["checkpoint"]["level"] == "warning"
    assert rows["checkpoint"]["next"] == f"dgpp cluster fetch --config {tmp_path}/d.json"
    assert rows["memory"]["expected"].startswith("at least ")
    folder = converted_folder(spec, tmp_path / "XDG_CACHE_HOME/dgpp/checkpoints")
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    rows = told("--config", "d.json")
    assert (rows["checkpoint"]["level"], rows["checkpoint"]["found"]) == ("ok", str(folder))


def test_a_port_that_is_taken_is_named(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert judged(facts(root, ports=[port]))["ports"].found == f"{port} taken"
    assert judged(facts(root, ports=[port]))["ports"].level == "ok"


def test_a_node_that_does_not_answer_is_one_fault(root: Path) -> None:
    (check,) = judge(
        [Seen(node="b", problem="a node cannot be reached: Permission denied", hint="ssh b true")], Wanted()
    )
    assert (check.what, check.level, check.next) == ("reach", "fault", "ssh b true")


def change(one: Facts, **fields: Any) -> Facts:
    return msgspec.structs.replace(one, **fields)


@pytest.mark.parametrize(
    ("harm", "what", "level"),
    [
        (
            lambda one: change(one, program=msgspec.structs.replace(one.program, dgpp_core="0.0.9")),
            "same software",
            "fault",
        ),
        (lambda one: change(one, ways={"a": msgspec.structs.replace(one.ways["a"], mtu=1500)}), "same MTU", "fault"),
    ],
    ids=["software", "MTU"],
)
def test_nodes_that_differ_are_named(root: Path, harm: Callable[[Facts], Facts], what: str, level: str) -> None:
    one = facts(root, towards=["127.0.0.1"])
    one = change(one, ways={"a": msgspec.structs.replace(one.ways["127.0.0.1"], mtu=9000)})
    found = {
        check.what: check for check in judge([Seen(node="a", facts=one), Seen(node="b", facts=harm(one))], Wanted())
    }
    assert found[what].level == level
    assert found[what].found.startswith("b: ")
    assert found[what].expected.startswith("as on rank 0: ")


@pytest.mark.parametrize(("skew", "level"), [(0.2, "ok"), (-30.0, "warning")])
def test_a_clock_is_compared_with_the_moment_it_was_read(root: Path, skew: float, level: str) -> None:
    one = facts(root)
    other = Seen(node="b", facts=one, time=100.5 + skew, before=100.0, after=101.0)
    checks = judge([Seen(node="a", facts=one), other], Wanted())
    (check,) = [check for check in checks if check.what == "clock" and check.node == "b"]
    assert check.level == level
    assert f"{skew:+.2f} s" in check.found


def test_slow_exchanges_are_told_beside_what_is_expected() -> None:
    limit = expected_us(48 << 10, 2, 200.0, "verbs")
    assert limit == pytest.approx(100 + 2 * 49152 * 8 / 200e3)
    fine, slow = timings(
        [Timing(bytes=48 << 10, median=limit, worst=900), Timing(bytes=48 << 10, median=2100, worst=2500)],
        2,
        200,
        "verbs",
    )
    assert (fine.level, slow.level) == ("ok", "warning")
    assert "2100 us" in slow.found


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are hosts")
def test_two_hosts_are_looked_at_and_exchange(cluster: Callable[[int], Cluster], glm: Path) -> None:
    two = cluster(2)
    done = two.dgpp("doctor", "--config", str(two.deployment(glm, 2)), "--json")
    checks = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    found = {(check["node"], check["what"]): check for check in checks}
    assert "eth0" in found["10.77.0.2", "network"]["found"]
    assert found["all", "same software"]["level"] == "ok"
    assert found["10.77.0.2", "clock"]["level"] == "ok"
    assert found["10.77.0.1", "memory"]["expected"].startswith("at least"), "the plan was asked"
    assert {f"exchange of {size} KiB" for size in (8, 48, 160, 1024)} <= {check["what"] for check in checks}
    assert [two.processes(host) for host in range(2)] == [[], []]
    two.net.cut(1)
    done = two.dgpp("doctor", "--no-exchange")
    assert done.returncode == 1
    assert "a node cannot be reached" in done.stdout


class Wrong(LoopbackBus):
    """A network that turns one bit."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum, but for one value."""
        total = super().all_reduce(partial)
        total[7] += 1
        return total


def test_an_exchange_measures_every_size_and_notices_a_wrong_sum() -> None:
    both = LoopbackWorld(2).run(lambda bus: measure(bus, time.perf_counter, (1024, 4096)))
    assert [[timing.bytes for timing in found] for found in both] == [[1024, 4096]] * 2
    assert all(0 < timing.median <= timing.worst for found in both for timing in found)

    def harmed(bus: LoopbackBus) -> str:
        bus.__class__ = Wrong
        with pytest.raises(EngineError, match="a sum over all nodes is wrong") as wrong:
            measure(bus, time.perf_counter, (1024,))
        return wrong.value.found

    assert LoopbackWorld(2).run(harmed) == ["1 of 512 values differ"] * 2
