"""A rank whose process runs and whose loop does wrong: it hangs, or computes something else than the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dgpp_core.testing.served_world import Crowd, free_port, served_world, started_rank

LIMIT_S = 4.0
"""The promise is 2 s; the rest is for a machine that does other things too."""
COMMON = """
import os, time, msgspec
from dgpp_core.engine.engine import Engine

right = Engine.launch

def harmed():
    return os.path.exists(os.environ["HARM"])
"""
HANGS = """
def launch(self, tick, operations):
    while harmed():
        time.sleep(0.1)
    return right(self, tick, operations)

Engine.launch = launch
"""
COMPUTES_SOMETHING_ELSE = """
class Wrong:
    def __init__(self, pending):
        self.pending = pending

    def wait(self):
        result = self.pending.wait()
        replace = msgspec.structs.replace
        slots = [replace(slot, tokens=(7,)) if harmed() and slot.slot == 1 else slot for slot in result.slots]
        return replace(result, slots=tuple(slots))

Engine.launch = lambda self, tick, operations: Wrong(right(self, tick, operations))
"""

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.mark.parametrize(
    ("harm", "told"),
    [(HANGS, "rank 1 hangs"), (COMPUTES_SOMETHING_ELSE, "rank 1 has diverged")],
    ids=["hangs", "diverges"],
)
def test_a_faulty_rank_is_named(glm: Path, environ: Mapping[str, str], tmp_path: Path, harm: str, told: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(COMMON + harm)  # Python runs it before anything else
    rendezvous = f"127.0.0.1:{free_port()}"
    model = ["--plugin=glm47", f"--checkpoint={glm}", "--no-mtp"]
    faulty = {**environ, "PYTHONPATH": str(tmp_path), "HARM": str(tmp_path / "harm")}
    leading = {**environ, "DGPP_FABRIC_PORT": str(free_port())}
    given = [*model[:2], "--rank=1", "--world=2", f"--rendezvous={rendezvous}"]
    with (
        started_rank(tmp_path, given, environ=faulty) as rank,
        served_world(tmp_path, [*model, "--world=2", f"--rendezvous={rendezvous}"], environ=leading) as world,
    ):
        crowd = Crowd(world, 4)
        world.until(4)
        (tmp_path / "harm").touch()
        assert world.seconds_to_unhealthy() <= LIMIT_S
        answers = [answer for answer in crowd.answers() if answer is not None]
        assert len(answers) == 4, "nobody is left without an answer"
        assert all(told in answer.text for answer in answers), answers
        assert world.process.wait(60) == 2
        assert rank.wait(30) != 0
        said = world.fault_file(0)
    if harm is COMPUTES_SOMETHING_ELSE:
        assert "tokens=(7,)" in said
        assert "step " in said
    else:
        assert "in launch" in world.fault_file(1), "the stacks say where it hangs"
