"""Starting, finding and stopping ranks: real processes of this host, each rank a stand-in that needs no model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from dgpp_core.api.errors import LaunchError
from dgpp_core.cli.cluster_options import locked
from dgpp_core.cli.main import cli
from dgpp_core.config.resolve import hidden_keys, resolve
from dgpp_core.config.rules import RULES
from dgpp_core.config.settings import parse_deployment
from dgpp_core.config.site import Site, read_site
from dgpp_core.launch.agent import inspect_node, processes, releases
from dgpp_core.launch.look import conditions, nodes_of, recorded, status
from dgpp_core.launch.nodes import LocalNode, Node, SshNode, call, run
from dgpp_core.launch.outside import Outside
from dgpp_core.launch.start import Launch, start, start_or_replace
from dgpp_core.launch.stop import stop
from dgpp_core.launch.world import EPOCH, Program, World, places, read_world, site_of

NODES = ("node-a.invalid", "node-b.invalid", "node-c.invalid")
READY = """print("loading", flush=True)
print("READY http://x/v1", flush=True) if role == "serve" else None
"""
RANK = """#!{python}
import os, signal, subprocess, sys, time
role = sys.argv[4]
{body}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.05)
"""


class Place:
    """A world of stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.outside = Outside(
            clock=time.monotonic, time=time.time, sleep=time.sleep, nodes=self._nodes,
            environ={"DGPP_EXTRA": "1", "DGPP_API_KEY": "secret", "HOME": "/nowhere"}, say=self.said.append,
        )  # fmt: skip

    @staticmethod
    def _nodes(names: Sequence[str], user: str, config: str) -> list[Node]:
        return [LocalNode(name) for name in names]

    def launch(self, body: str = READY, world: int = 2) -> Launch:
        """What starts ranks that run ``body`` first."""
        program = self.folder / "rank"
        program.write_text(RANK.format(python=sys.executable, body=body))
        program.chmod(0o755)
        text = json.dumps({"model": "some/model", "world_size": world})
        site = Site(nodes=NODES, log_dir=f"{self.folder}/log", stage_dir=f"{self.folder}/stage")
        file = self.folder / "deployment.json"
        resolved = resolve(parse_deployment(json.loads(text), "here"), site, {})
        return Launch(
            deployment=file, text=text, site=site, resolved=resolved, places=places(resolved, file),
            program=Program(python=str(program)), preflight=False,
        )  # fmt: skip

    def states(self, world: World) -> list[str]:
        """Of its ranks."""
        return [seen.state for seen in conditions(nodes_of(world, self.outside), world.members)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for _, world in recorded(tmp_path / "log" / "deployments"):
        with contextlib.suppress(LaunchError):
            stop(world, made.outside, drain=1.0)


def test_a_world_is_started_found_refused_replaced_and_stopped(place: Place) -> None:
    launch = place.launch()
    world = start(launch, place.outside)
    assert place.states(world) == ["running", "running"]
    assert read_world(launch.places.log) == world
    assert "rank 0 (node-a.invalid): READY http://x/v1" in place.said
    with pytest.raises(LaunchError, match="run already") as refused:
        start_or_replace(launch, place.outside, world, replace=False, limit=10)
    assert "rank 1 (node-b.invalid)" in refused.value.found
    assert place.states(world) == ["running", "running"], "a refusal harms nobody"
    second = start_or_replace(launch, place.outside, world, replace=True, limit=10)
    assert (world.epoch, second.epoch) == (1, 2)
    os.kill(conditions(nodes_of(second, place.outside), second.members)[1].pid, signal.SIGSTOP)
    assert place.states(second) == ["running", "stopped"]
    for _ in range(2):
        stop(second, place.outside, drain=5.0)
        assert place.states(second) == ["none", "none"]
    assert status(second, place.outside).down


def test_a_rank_gets_its_files_its_arguments_and_the_environment_that_is_meant_for_it(place: Place) -> None:
    body = f"print(sys.argv, flush=True); print(sorted(os.environ), flush=True)\n{READY}"
    launch = place.launch(body)
    world = start(launch, place.outside)
    folder = Path(world.members[1].folder)
    line, names = (folder / world.members[1].log(1)).read_text().splitlines()[:2]
    assert f"'--config', '{folder}/deployment.json'" in line
    assert "'--rank', '1', '--world', '2', '--rendezvous', 'node-a.invalid:29971', '--epoch', '1'" in line
    assert "'DGPP_EXTRA'" in names
    assert "'DGPP_API_KEY'" not in [*names.split(", ")], "keys stay where they are"
    assert (folder / "deployment.json").read_text() == launch.text
    assert 'DGPP_NODES="node-a.invalid node-b.invalid node-c.invalid"' in (folder / "rank1.env").read_text()
    assert (folder / "rank1.env").stat().st_mode & 0o77 == 0


def test_a_rank_reads_the_site_that_the_launcher_read(place: Place, tmp_path: Path) -> None:
    """Every key, but those that are the launcher's own."""
    launch = place.launch()
    given = {
        "DGPP_HTTP_PORT": "18081", "DGPP_HTTP_BIND": "0.0.0.0", "DGPP_FABRIC_PORT": "3", "DGPP_JOURNAL_PORT": "4",
        "DGPP_API_KEY_FILE": "/keys", "DGPP_BUS": "gloo", "DGPP_ROCE_DEVICES": "r0 r1", "DGPP_ROCE_GID_INDICES": "3 4",
        "HF_HUB_CACHE": "/hub", "DGPP_RESIDENT_CACHE_DIR": "/images", "DGPP_LOG_LEVEL": "debug", "DGPP_MLOCK": "off",
        "DGPP_NODES": " ".join(NODES), "DGPP_DATA_DIR": "data",
    }  # fmt: skip
    launchers = {
        "DGPP_SSH_USER", "DGPP_SSH_CONFIG", "DGPP_PYTHON", "DGPP_CLUSTER_CONFIG", "DGPP_LOG_DIR", "DGPP_STAGE_DIR",
        "DGPP_RELEASE_DIR", "DGPP_NODE_OVERRIDES", "HF_HOME",
    }  # fmt: skip
    assert set(given) | launchers == set(RULES), "a new key is passed on, or stands here"
    site = read_site(None, given, tmp_path)
    resolved = resolve(parse_deployment(json.loads(launch.text), "here"), site, {})
    (tmp_path / "rank0.env").write_text(site_of(site, resolved, 0))
    assert read_site(tmp_path / "rank0.env", {}) == site
    named = {"http": {"port": 18082, "bind_host": "127.0.0.1", "api_key_file": "/own"}}
    resolved = resolve(parse_deployment(json.loads(launch.text) | named, "here"), site, {})
    (tmp_path / "rank0.env").write_text(site_of(site, resolved, 0))
    assert not hidden_keys(resolved, read_site(tmp_path / "rank0.env", {}), {}), "the launcher has said it"
    resolved = resolve(parse_deployment(json.loads(launch.text), "here"), site, {})
    other = msgspec.structs.replace(site, node_overrides={NODES[1]: {"HF_HUB_CACHE": "/other"}})
    resolved = resolve(parse_deployment(json.loads(launch.text), "here"), other, {})
    (tmp_path / "rank1.env").write_text(site_of(other, resolved, 1))
    found = read_site(tmp_path / "rank1.env", {})
    assert (found.hub_cache, found.api_key_file) == ("/other", ""), "keys of the service stay on rank 0"


@pytest.mark.parametrize(
    ("body", "limit", "told"),
    [
        ('print("no room", flush=True)\nsys.exit(1) if role == "rank" else None', 60.0, "no room"),
        ("time.sleep(60)", 1.0, "not ready after"),
    ],
    ids=["one ends", "none is ready"],
)
def test_a_start_that_fails_ends_what_it_has_started(place: Place, body: str, limit: float, told: str) -> None:
    with pytest.raises(LaunchError) as failed:
        start(place.launch(body), place.outside, limit=limit)
    assert told in str(failed.value)
    world = read_world(place.launch().places.log)
    assert world is not None
    assert place.states(world) == ["none", "none"]


def test_children_of_a_rank_that_was_killed_are_found_and_ended(place: Place) -> None:
    child = 'p = subprocess.Popen(["sleep", "600"], start_new_session=True)\nprint("child", p.pid, flush=True)\n'
    world = start(place.launch(child + READY), place.outside)
    seen = conditions(nodes_of(world, place.outside), world.members)
    assert [len(rank.others) for rank in seen] == [1, 1]
    for rank in seen:
        os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(LaunchError, match="run already"):
        start(place.launch(), place.outside)
    stop(world, place.outside, drain=0.5)
    for rank in seen:
        assert [pid for pid in rank.others if _runs(pid)] == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("field", "value"), [("start", "1"), ("boot", "another")])
def test_a_process_that_only_has_the_number_of_a_recorded_one_is_left_alone(
    tmp_path: Path, field: str, value: str
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        started = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        known = {"pid": other.pid, "start": started, "boot": processes.boot(), "mark": "m"} | {field: value}
        (tmp_path / "record").write_text(json.dumps(known))
        node = LocalNode("here")
        assert call(node, processes.state, str(tmp_path), "record")["state"] == "gone"
        assert call(node, processes.tell, str(tmp_path), "record", int(signal.SIGKILL), True) == []
        assert other.poll() is None
        other.kill()


def test_epochs_are_never_used_twice(place: Place) -> None:
    launch = place.launch()
    for epoch in (1, 2):
        world = start(launch, place.outside)
        assert world.epoch == epoch
        stop(world, place.outside, drain=5.0)
    (launch.places.log / EPOCH).write_text("x\n")
    with pytest.raises(LaunchError, match="counter of starts is damaged"):
        start(launch, place.outside)


class Mute:
    """A node that has gone."""

    name, python = "node-b.invalid", "false"

    def command(self, line: Sequence[str]) -> list[str]:
        """Fails."""
        return ["false"]


def test_a_node_that_does_not_answer_is_unknown_and_never_taken_for_stopped(place: Place) -> None:
    world = start(place.launch(), place.outside)
    away = msgspec.structs.replace(place.outside, nodes=lambda *_: [LocalNode("node-a.invalid"), Mute()])
    seen = status(world, away)
    assert [rank.state for rank in seen.ranks] == ["running", "unknown"]
    with pytest.raises(LaunchError, match="not every rank is known to have ended") as failed:
        stop(world, away, drain=5.0)
    assert "rank 1 (node-b.invalid)" in failed.value.found
    assert place.states(world) == ["none", "running"]


def test_what_failed_first_is_told_although_the_end_is_not_confirmed(place: Place) -> None:
    later = iter([[LocalNode("node-a.invalid"), LocalNode("node-b.invalid")], [LocalNode("node-a.invalid"), Mute()]])
    away = msgspec.structs.replace(place.outside, nodes=lambda *_: next(later))
    with pytest.raises(LaunchError, match="has ended before the world was ready"):
        start(place.launch("sys.exit(1)"), away)
    assert any("not every rank is known to have ended" in line for line in place.said)


def test_a_log_is_followed_by_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes("eins\nzw\u00f6".encode())
    first = processes.read_from(str(tmp_path), "log", 0, 100, whole_lines=True)
    assert first == {"text": "eins\n", "offset": 5}
    (tmp_path / "log").write_bytes("eins\nzw\u00f6lf\n".encode())
    assert processes.read_from(str(tmp_path), "log", 5, 100, whole_lines=True)["text"] == "zw\u00f6lf\n"
    assert processes.read_from(str(tmp_path), "log", 0, 3)["text"] == "lf\n"
    assert processes.read_from(str(tmp_path), "none", 0, 3) == {"text": "", "offset": 0}


@pytest.mark.parametrize(
    ("line", "found"), [("exit 3", "exit status 3"), ("echo why >&2; exit 1", "why")], ids=["status", "words"]
)
def test_a_command_that_fails_is_quoted(line: str, found: str) -> None:
    with pytest.raises(LaunchError) as failed:
        run(LocalNode("here"), ["sh", "-c", line])
    assert failed.value.found == found


def test_what_a_function_raises_on_a_node_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="a node cannot write") as failed:
        call(LocalNode("here"), processes.write, str(tmp_path / "file" / "below"), "x", "y")
    assert "NotADirectoryError" in failed.value.found


def test_lines_are_quoted_for_the_shell_of_a_node() -> None:
    node = SshNode("spark-2", "me", "/etc/own")
    command = node.command(["python3", "-c", "print('a b')"])
    assert command[-3:] == ["spark-2", "--", "python3 -c 'print('\"'\"'a b'\"'\"')'"]
    assert ("BatchMode=yes" in command, command[-5:-3]) == (True, ["-l", "me"])


def test_the_oldest_logs_go(tmp_path: Path) -> None:
    for epoch in range(5):
        (tmp_path / f"rank-0.epoch-{epoch}.log").touch()
        os.utime(tmp_path / f"rank-0.epoch-{epoch}.log", (epoch, epoch))
    processes.prune(str(tmp_path), 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.epoch-3.log", "rank-0.epoch-4.log"]


def test_the_helper_runs_on_an_older_python() -> None:
    """Its source stays within what 3.9 parses, and imports the standard library alone."""
    import ast
    import inspect

    for module in (processes, releases, inspect_node):
        tree = ast.parse(inspect.getsource(module), feature_version=(3, 9))
        roots = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        roots |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert {root.partition(".")[0] for root in roots} <= sys.stdlib_module_names


def test_the_command_line_shows_where_a_deployment_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGPP_LOG_DIR", str(tmp_path / "log"))
    file = tmp_path / "d.json"
    file.write_text('{"model": "some/model", "world_size": 1}')
    name = hashlib.sha256(str(file).encode()).hexdigest()[:16]
    shown = CliRunner().invoke(cli, ["cluster", "paths", "--config", str(file), "--json"])
    assert json.loads(shown.stdout)["log"] == f"{tmp_path}/log/deployments/{name}"
    resolved = CliRunner().invoke(cli, ["cluster", "resolve", "--config", str(file)])
    assert json.loads(resolved.stdout)["paths"]["stage_dir"] == f"/tmp/bus4/deployments/{name}"
    own = CliRunner().invoke(
        cli, ["cluster", "paths", "--config", str(file), "--log-dir", str(tmp_path / "x"), "--json"]
    )
    assert json.loads(own.stdout)["log"] == f"{tmp_path}/x"
    assert CliRunner().invoke(cli, ["cluster", "down", "--config", str(file)]).exit_code == 0
    both = CliRunner().invoke(cli, ["cluster", "down", "--all", "--config", str(file)])
    assert both.exit_code == 2


def test_one_launcher_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(LaunchError, match="another launcher"), locked(tmp_path):
        pass
