"""The generated plugin, installed the way an installer would do it, and a random checkpoint of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.new_plugin import write_plugin
from dgpp_core.host.loading import LoadedModel, load_plugins


@pytest.fixture(scope="session")
def toy_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly generated package, importable once it is on the path."""
    folder = tmp_path_factory.mktemp("generated")
    write_plugin("toy", folder)
    root = folder / "dgpp-toy"
    info = root / "dgpp_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dgpp-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[dgpp.plugins]\ntoy = dgpp_toy\n")
    return root


@pytest.fixture(scope="session")
def toy_path(toy_package: Path) -> Iterator[Path]:
    """The same, on this process's path."""
    sys.path.insert(0, str(toy_package))
    yield toy_package
    sys.path.remove(str(toy_package))


@pytest.fixture(scope="session")
def toy(toy_path: Path) -> LoadedModel:
    """The generated model, found by its entry point."""
    return load_plugins(environ={"DGPP_PLUGINS": "toy"}).model("toy")


@pytest.fixture(scope="session")
def toy_checkpoint(toy: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny model."""
    folder = tmp_path_factory.mktemp("checkpoint") / "toy"
    raw = toy.spec.tiny_config
    synthesise(toy.spec, toy.bindings(toy.read_config(raw)), raw, folder, seed=0)
    return folder
