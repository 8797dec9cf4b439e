"""The fault file: there from the start, refused where it cannot be, and written whatever became of the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dgpp_core.api import ConfigError, EngineError
from dgpp_core.cluster.faults import FaultFile
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.cluster.stream import OperationStream


def test_a_full_disk_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "rank-3.epoch-2.txt").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="log directory") as raised:
        FaultFile(tmp_path, 3, 2, 0.0)
    assert "No space left" in raised.value.found


def test_a_folder_that_is_none_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="log directory") as raised:
        FaultFile(tmp_path / "file", 3, 2, 0.0)
    assert str(tmp_path / "file") in raised.value.where


def test_it_says_why_what_and_where(tmp_path: Path) -> None:
    file = FaultFile(tmp_path, 3, 2, 0.0)
    assert file.path.read_text().startswith("rank 3, epoch 2, process ")
    pulse = Pulse(lambda: 5.0)
    pulse.turn("collective", "collective 0, barrier")
    file.write(EngineError("a reason", hint="a hint"), pulse, OperationStream(), 0.0)
    said = file.path.read_text()
    for part in ("a reason", "a hint", "collective 0, barrier", "last step: 0", "test_it_says_why_what_and_where"):
        assert part in said


def test_a_disk_that_fills_later_keeps_nobody_from_ending(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from dgpp_core.api import EngineError
from dgpp_core.cluster.process import Life
import signal

life = Life(1, 1, sys.argv[1], lambda: 0.0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (80, 80))
error = EngineError("a reason")
error.exit_code = 7
life.end(error)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    assert len((tmp_path / "rank-1.epoch-1.txt").read_bytes()) == 80
