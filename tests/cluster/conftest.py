"""What tests of real rank processes share: a random GLM with four key/value heads and drafts, and an environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from dgpp_core.cli.main import cli


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that one, two and four ranks can divide."""
    folder = tmp_path_factory.mktemp("glm") / "tiny"
    done = CliRunner().invoke(cli, ["synth", "glm47", "--tiny", str(folder)])
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def environ() -> Mapping[str, str]:
    """One thread a rank: the processors are few."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
