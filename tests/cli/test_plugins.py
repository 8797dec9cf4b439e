"""``dgpp plugins`` and ``dgpp version`` against the plugins that are installed, and one that is broken."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dgpp_core.cli.main import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin whose import fails, installed beside the others."""
    file = tmp_path / "cracked.py"
    file.write_text("1 / 0\n")
    info = tmp_path / "cracked-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cracked\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[dgpp.plugins]\ncracked = cracked\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def test_list_shows_models_and_the_broken_beside_them(broken: Path) -> None:
    done = run("plugins", "list")
    assert done.exit_code == 0
    assert f"dgpp-llama {version('dgpp-llama')}" in done.output
    assert "smollm2" in done.output
    assert f"cracked 0.3 (entry point cracked = cracked), {broken}:1" in done.output
    assert "ZeroDivisionError" in done.output


def test_list_as_json(broken: Path) -> None:
    listing = json.loads(run("plugins", "list", "--json").output)
    llama = next(item for item in listing["plugins"] if item["plugin"]["name"] == "llama")
    assert llama["plugin"]["distribution"] == "dgpp-llama"
    assert "smollm2" in llama["models"]
    (problem,) = listing["problems"]
    assert problem["plugin"]["name"] == "cracked"
    assert problem["place"] == f"{broken}:1"


@pytest.mark.parametrize("name", ["llama", "dgpp-llama", "smollm2"])
def test_check_a_sound_plugin(name: str) -> None:
    done = run("plugins", "check", name, "--json")
    assert done.exit_code == 0
    findings = json.loads(done.output)["findings"]
    assert {finding["level"] for finding in findings} == {"ok"}
    assert any(finding["subject"] == "smollm2, full_config" for finding in findings)


def test_check_a_broken_plugin_is_exit_1(broken: Path) -> None:
    done = run("plugins", "check", "cracked")
    assert done.exit_code == 1
    assert "error    cracked: the plugin cannot be imported" in done.output
    assert f"{broken}:1" in done.output


def test_check_an_unknown_plugin() -> None:
    done = run("plugins", "check", "lama", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stderr)["error"]["type"] == "PluginError"


def test_versions_are_those_of_the_metadata() -> None:
    found = json.loads(run("version", "--json").output)
    assert found["dgpp_core"] == version("dgpp-core")
    assert found["plugins"]["dgpp-llama"] == version("dgpp-llama")
    assert found["libraries"]["torch"] == version("torch")
    assert found["python"] == platform.python_version()
    assert f"python           {platform.python_version()}" in run("version").output
