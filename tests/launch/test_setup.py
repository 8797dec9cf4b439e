"""The wizard: a site file that keeps what it is not asked to change, answers that are checked, and a real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dgpp_core.api.errors import ConfigError
from dgpp_core.cli.main import cli
from dgpp_core.cli.questions import copied, pick, settings
from dgpp_core.config.envfile import parse_env
from dgpp_core.config.rules import RULES
from dgpp_core.config.site import Site, read_site
from dgpp_core.launch.facts import RdmaDevice
from dgpp_core.launch.lanes import common_lanes
from dgpp_core.launch.sitefile import edited, require_unexported, save
from dgpp_core.testing.ssh_cluster import Cluster
from dgpp_core.testing.ssh_hosts import unavailable

BEFORE = """# our cluster
HF_TOKEN='a secret # not ours'
export DGPP_NODES="a b"   # two of them
OTHER=x
"""


def test_what_is_not_meant_stays_as_it_was() -> None:
    after = edited(BEFORE, {"DGPP_NODES": "c d", "DGPP_HTTP_PORT": "18081"})
    assert (
        after
        == """# our cluster
HF_TOKEN='a secret # not ours'
DGPP_NODES="c d"
OTHER=x
DGPP_HTTP_PORT=18081
"""
    )
    assert edited(after, {"DGPP_NODES": "c d", "DGPP_HTTP_PORT": "18081"}) == after


@given(st.text("ab# '\"=$\\\t~/.", min_size=1, max_size=12))
def test_a_value_that_is_written_is_read_again(value: str) -> None:
    if '"' in value and "'" in value:
        with pytest.raises(ConfigError, match="quotes of both kinds"):
            edited("OTHER=1", {"DGPP_LOG_DIR": value})
        return
    text = edited("OTHER=1", {"DGPP_LOG_DIR": value})
    assert parse_env(text, "file", RULES)["DGPP_LOG_DIR"].value == value


@pytest.mark.parametrize(("key", "value"), [("DGPP_NODES", "a a"), ("DGPP_HTTP_PORT", "0"), ("DGPP_STAGE_DIR", "x")])
def test_a_value_that_would_be_refused_is_not_written(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} has a value that is not allowed"):
        edited("", {key: value})


def test_an_exported_variable_that_says_otherwise_is_refused() -> None:
    require_unexported({"DGPP_NODES": "a"}, {"DGPP_NODES": "a"})
    with pytest.raises(ConfigError, match="DGPP_NODES is exported with another value"):
        require_unexported({"DGPP_NODES": "a"}, {"DGPP_NODES": "b"})


def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    save(path, "A=1\n")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    save(path, "A=2\n")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("A=2\n", 0o640)
    assert [entry.name for entry in tmp_path.iterdir()] == [".env"]


def test_only_what_is_not_given_is_asked_and_only_what_changes_is_written(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"model": "some/model", "world_size": 2}')
    answers = {"port of the service": "18081", "hosts in rank order, this one first": "a b"}
    asked: list[str] = []

    def ask(question: str, there: str) -> str:
        asked.append(question)
        return answers.get(question, there)

    picked = pick(tmp_path / "d.json", None, Site(), ask)
    found = settings({}, picked, Site(), ask)
    assert found == {
        "DGPP_CLUSTER_CONFIG": str(tmp_path / "d.json"), "DGPP_NODES": "a b", "DGPP_HTTP_PORT": "18081",
    }  # fmt: skip
    assert "deployment file" not in asked
    with pytest.raises(ConfigError, match="more ranks than there are hosts"):
        settings({}, picked, Site(), None)
    with pytest.raises(ConfigError, match="nothing says which deployment"):
        pick(None, None, Site(), None)


def test_what_the_deployment_goes_before_is_not_asked_and_refused_where_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"model": "some/model", "world_size": 1, "http": {"port": 18080}}')
    asked: list[str] = []

    def ask(question: str, there: str) -> str:
        asked.append(question)
        return there

    picked = pick(tmp_path / "d.json", None, Site(), ask)
    settings({}, picked, Site(), ask)
    assert "port of the service" not in asked
    assert any(question.startswith("address it listens on") for question in asked)
    assert settings({"DGPP_HTTP_PORT": "18080"}, picked, Site(), None)
    with pytest.raises(ConfigError, match="--http-port cannot act") as caught:
        settings({"DGPP_HTTP_PORT": "18099"}, picked, Site(), None)
    assert caught.value.found == "18080, and --http-port 18099"


def test_a_name_that_cannot_be_read_is_asked_again_and_templates_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/a.example.json").write_text('{"model": "some/model", "world_size": 2}')
    answers = iter(["glm47", "deploy/none.example.json", "deploy/a.example.json"])
    picked = pick(None, None, Site(), lambda question, there: next(answers))
    assert (picked.path, picked.template) == (str(tmp_path / "deploy/a.json"), Path("deploy/a.example.json"))
    said = capsys.readouterr()
    assert "  deploy/a.example.json\n" in said.out
    assert f"{tmp_path}/glm47" in said.err
    assert "deploy/none.example.json" in said.err
    assert not (tmp_path / "deploy/a.json").exists()


@pytest.mark.usefixtures("unsettled")
def test_a_refusal_leaves_no_copy_and_no_site_file(tmp_path: Path) -> None:
    (tmp_path / "a.example.json").write_text('{"model": "some/model", "world_size": 2}')
    done = CliRunner().invoke(cli, ["setup"])
    assert (done.exit_code, "no terminal: use --yes" in done.stderr) == (2, True)
    for more in ((), ("--nodes", "a b", "--http-bind", "nowhere")):
        done = CliRunner().invoke(cli, ["setup", "--yes", "--template", "a.example.json", *more])
        assert done.exit_code == 2, done.stderr
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.example.json"]


@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize("before", ["", "DGPP_HTTP_PORT=7000\n"], ids=["no site file", "a site file"])
def test_a_failure_before_the_end_leaves_everything_as_it_was(tmp_path: Path, before: str) -> None:
    """The hosts are asked for their devices, and cannot be reached."""
    (tmp_path / "a.example.json").write_text('{"model": "some/model", "world_size": 2}')
    if before:
        (tmp_path / ".env").write_text(before)
    there = {entry.name: entry.read_text() for entry in tmp_path.iterdir()}
    line = ("setup", "--yes", "--template", "a.example.json", "--nodes", "localhost nowhere.invalid")
    done = CliRunner().invoke(cli, line)
    assert done.exit_code != 0
    assert "nowhere.invalid" in done.stderr
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == there


@pytest.mark.usefixtures("unsettled")
def test_a_failure_after_the_files_are_written_says_that_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.example.json").write_text(json.dumps({"model": str(tmp_path / "none"), "world_size": 1}))
    done = CliRunner().invoke(cli, ["setup", "--yes", "--offline", "--template", "a.example.json"])
    assert done.exit_code != 0
    assert f".env and {tmp_path}/a.json are in place; `dgpp setup --yes` goes on from there" in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".env", "a.example.json", "a.json"]
    again = CliRunner().invoke(cli, ["setup", "--yes", "--offline"])
    assert again.exit_code == done.exit_code, "nothing more has to be given"


@pytest.mark.usefixtures("unsettled")
def test_a_look_without_a_deployment_says_so_first_and_ends_as_the_doctor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGPP_LOG_DIR", str(tmp_path / "log"))
    done = CliRunner().invoke(cli, ["setup", "--check"])
    lines = done.stdout.splitlines()
    assert "none is named" in lines[0]
    assert lines[0].startswith("WARN ")
    assert (done.exit_code, lines[-1].partition(",")[0], done.stderr) == (0, "0 faults", "")


def device(name: str, state: str = "4: ACTIVE") -> RdmaDevice:
    return RdmaDevice(name=name, state=state, layer="Ethernet", rate="200 Gb/sec", gids=(), mtu=9000)


@pytest.mark.parametrize(
    ("devices", "lanes", "told"),
    [
        ({"a": [device("r0"), device("r1"), device("r2")], "b": [device("r1"), device("r0")]}, ("r0", "r1"), "RDMA by"),
        ({"a": [device("r0")], "b": [device("r0", "1: DOWN"), device("r1")]}, (), "DGPP_NODE_OVERRIDES"),
        ({"a": [], "b": []}, (), "TCP"),
    ],
)
def test_lanes_are_those_that_every_node_has(
    devices: dict[str, list[RdmaDevice]], lanes: tuple[str, ...], told: str
) -> None:
    found, words = common_lanes(devices)
    assert found == lanes
    assert told in words


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are hosts")
def test_two_hosts_are_set_up_and_a_look_changes_nothing(cluster: Callable[[int], Cluster], glm: Path) -> None:
    two = cluster(2)
    template = two.folder / "tiny.example.json"
    template.write_text(json.dumps({"model": str(glm), "world_size": 2}))
    site = Path(two.environ["DGPP_ENV_FILE"])
    line = ("setup", "--yes", "--offline", "--template", str(template), "--http-port", "18099")
    done = two.dgpp(*line)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"dgpp cluster up --config {two.folder}/tiny.json" in done.stdout
    assert "10.77.0.2: " in done.stderr
    assert "files as on rank 0" in done.stderr
    found = read_site(site, {})
    assert (found.http_port, found.cluster_config) == (18099, f"{two.folder}/tiny.json")
    before = site.read_text()
    assert two.dgpp("setup", "--check").returncode == 0
    assert site.read_text() == before


def test_a_deployment_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.example.json").write_text('{"model": "some/model", "world_size": 2}')
    copy = copied(tmp_path / "a.example.json")
    assert copy.read_text() == (tmp_path / "a.example.json").read_text()
    copy.write_text('{"model": "mine/own", "world_size": 1}')
    with pytest.raises(ConfigError, match="has come meanwhile"):
        copied(tmp_path / "a.example.json")
    picked = pick(None, tmp_path / "a.example.json", Site(), None)
    assert (picked.template, picked.deployment.model) == (None, "mine/own")
    with pytest.raises(ConfigError, match="not a template"):
        copied(copy)
