"""Ranks that are started apart: who joins, who is refused, and what the log says of both sides."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import dgpp_core
from dgpp_core.host.child import module_command
from dgpp_core.testing.served_world import await_line, free_port, started_rank

pytestmark = pytest.mark.slow


class Waiting:
    """Rank 0, which waits for rank 1."""

    def __init__(self, process: subprocess.Popen[str], rendezvous: str) -> None:
        self.process, self.rendezvous = process, rendezvous

    def log(self) -> str:
        """What it had to say, once it has ended."""
        return self.process.communicate(timeout=90)[1]


@contextlib.contextmanager
def waiting(folder: Path, environ: Mapping[str, str], *arguments: str) -> Iterator[Waiting]:
    address = f"127.0.0.1:{free_port()}"
    line = [
        *module_command("dgpp_core.cli", "serve", f"--port={free_port()}", f"--rendezvous={address}"),
        f"--log-dir={folder}", "--epoch=7", *arguments,
    ]  # fmt: skip
    pipe = subprocess.PIPE
    environ = {**environ, "DGPP_FABRIC_PORT": str(free_port())}
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environ) as process:
        try:
            yield Waiting(process, address)
        finally:
            process.kill()


def test_a_rank_of_an_older_start_is_refused_and_the_world_forms_without_it(
    glm: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    """By shared memory, as rank 0 is told; the others are told nothing, and take what rank 0 takes."""
    model = ("--plugin=glm47", f"--checkpoint={glm}")
    with waiting(tmp_path, environ, *model, "--world=2", "--bus=shm") as leader:
        given = [*model, "--rank=1", "--world=2", f"--rendezvous={leader.rendezvous}"]
        with started_rank(tmp_path / "old", [*given, "--epoch=6"], environ=environ) as old:
            refused = old.communicate(timeout=60)[1]
        assert old.returncode == 2
        assert "started for epoch 6; this is epoch 7" in refused
        with started_rank(tmp_path, [*given, "--epoch=7"], environ=environ) as rank:
            assert await_line(leader.process).startswith("READY")
            with started_rank(tmp_path / "twin", [*given, "--epoch=7"], environ=environ) as twin:
                assert "comes second" in twin.communicate(timeout=60)[1]
            rank.send_signal(signal.SIGTERM)
            leader.process.send_signal(signal.SIGTERM)
            log = leader.log()
            said = rank.communicate(timeout=30)[1]
            assert (leader.process.returncode, rank.returncode) == (0, 0), log
    assert "rank 0 of 2: collectives over shared memory" in log
    assert "rank 1 of 2: collectives over shared memory" in said
    assert "epoch 6" in log
    assert "2 ranks took the same" in log


def test_ranks_of_two_versions_form_no_world(glm: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    source = Path(dgpp_core.__file__).parent
    other = tmp_path / "other" / "dgpp_core"
    shutil.copytree(source, other, ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "__init__.py"
    init.write_text(init.read_text().replace(dgpp_core.__version__, "99.0"))
    model = ("--plugin=glm47", f"--checkpoint={glm}")
    with waiting(tmp_path, environ, *model, "--world=2") as leader:
        given = [*model, "--rank=1", "--world=2", f"--rendezvous={leader.rendezvous}", "--epoch=7"]
        newer = {**environ, "PYTHONPATH": str(other.parent), "PYTHONSAFEPATH": "1"}
        with started_rank(tmp_path, given, environ=newer) as rank:
            refused = rank.communicate(timeout=90)[1]
        log = leader.log()
        assert rank.returncode not in (0, None)
        assert leader.process.returncode not in (0, None)
    for said in (refused, log):
        assert "version '99.0'" in said
        assert f"version '{dgpp_core.__version__}'" in said
        assert "rank 1" in said


def test_a_rank_that_insists_on_other_settings_is_refused(
    glm: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    nodes = {**environ, "DGPP_NODES": "one two"}
    files = []
    for capacity in (4096, 8192):
        files.append(tmp_path / f"{capacity}.json")
        body = {"model": "zai-org/GLM-4.7", "world_size": 2, "engine": {"kv_capacity": capacity}}
        files[-1].write_text(json.dumps(body))
    model = ("--plugin=glm47", f"--checkpoint={glm}")
    with waiting(tmp_path, nodes, *model, f"--config={files[0]}") as leader:
        given = [*model, f"--config={files[1]}", "--rank=1", "--world=2", f"--rendezvous={leader.rendezvous}"]
        with started_rank(tmp_path, [*given, "--epoch=7"], environ=nodes) as rank:
            refused = rank.communicate(timeout=90)[1]
        log = leader.log()
        assert leader.process.returncode not in (0, None)
    for said in (refused, log):
        assert "kv_capacity 8192" in said
        assert "kv_capacity 4096, as rank 0 has it" in said


def test_a_rank_that_does_not_come_is_named(glm: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    arguments = ("--plugin=glm47", f"--checkpoint={glm}", "--world=4", "--rendezvous-timeout-ms=300")
    with waiting(tmp_path, environ, *arguments) as leader:
        log = leader.log()
        assert leader.process.returncode == 2
    assert "rank 1, rank 2, rank 3 of 4 did not come within 0.3 s" in log
    assert os.listdir(tmp_path) == ["rank-0.epoch-7.txt"]
