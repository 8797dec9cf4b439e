"""``dgpp new-plugin``: what it writes, and that it is a package in good order."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dgpp_core.cli.main import cli
from dgpp_core.cli.new_plugin import check_name, write_plugin
from dgpp_core.host.check import check_plugin, imported_libraries
from dgpp_core.host.loading import load_plugins

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_names_are_put_everywhere(tmp_path: Path) -> None:
    done = run("new-plugin", "acme-lm", "--dir", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    files = [Path(name) for name in json.loads(done.output)["files"]]
    root = tmp_path / "dgpp-acme-lm"
    assert root / "dgpp_acme_lm" / "model.py" in files
    assert {path for path in root.rglob("*") if path.is_file()} == set(files)
    for path in files:
        assert "@" not in path.name
        assert "@NAME@" not in (text := path.read_text())
        assert "@MODULE@" not in text
        assert "@CLASS@" not in text
    assert "class AcmeLmModel:" in (root / "dgpp_acme_lm" / "model.py").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["name"] == "dgpp-acme-lm"
    assert project["entry-points"]["dgpp.plugins"] == {"acme-lm": "dgpp_acme_lm"}


def test_the_prefix_may_be_given(tmp_path: Path) -> None:
    assert check_name("dgpp-acme") == check_name("acme") == "acme"
    assert write_plugin("dgpp-acme", tmp_path)[0].is_relative_to(tmp_path / "dgpp-acme")


@pytest.mark.parametrize("name", ["", "Acme", "a_b", "1a", "a--b", "a-", "-a", "class", "core", "../x", "a.b", "ä"])
def test_names_that_cannot_be_packages_are_refused(name: str, tmp_path: Path) -> None:
    done = run("new-plugin", "--dir", str(tmp_path), "--", name)
    assert done.exit_code == 2
    assert "cannot be the name of a plugin" in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dgpp-acme").mkdir()
    (tmp_path / "dgpp-acme" / "mine.txt").write_text("mine")
    done = run("new-plugin", "acme", "--dir", str(tmp_path))
    assert done.exit_code == 2
    assert "is taken" in done.stderr
    assert [path.name for path in (tmp_path / "dgpp-acme").iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_the_generated_plugin_is_sound(toy_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(toy_path))
    findings = check_plugin(load_plugins(environ={}), "toy", imported_libraries)
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert len(findings) == 4


def test_the_generated_source_is_clean(toy_package: Path) -> None:
    for command in (
        ["check", "--select", "A,B,C4,E,F,I,N,PERF,PIE,RET,RUF,SIM,UP,W", "--ignore=N812"],
        ["format", "--check"],
    ):
        line = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length=120", "."]
        done = subprocess.run(line, cwd=toy_package, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_generated_source_is_typed(toy_package: Path) -> None:
    line = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={ROOT / '.mypy_cache'}", "dgpp_toy"]
    done = subprocess.run(line, cwd=toy_package, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_generated_package_passes_the_conformance_kit(toy_package: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(toy_package), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(line, cwd=toy_package, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def _build_wheel(project: Path, folder: Path) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    line = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(line, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_generated_package_builds_a_wheel_with_its_entry_point(toy_package: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(_build_wheel(toy_package, tmp_path)) as wheel:
        names = set(wheel.namelist())
        assert {f"dgpp_toy/{name}.py" for name in ("__init__", "config", "drafter", "model", "tables")} <= names
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "toy = dgpp_toy" in wheel.read(entry).decode()


@pytest.mark.slow
def test_our_own_wheel_carries_the_templates(tmp_path: Path) -> None:
    source = {str(p.relative_to(ROOT)) for p in (ROOT / "dgpp_core" / "cli" / "templates").rglob("*.txt")}
    assert len(source) >= 8
    with zipfile.ZipFile(_build_wheel(ROOT, tmp_path)) as wheel:
        assert source <= set(wheel.namelist())
