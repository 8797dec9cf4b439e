"""Runs `interpreted/` with Triton's interpreter, which a process has to choose before it imports Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is there on Linux only")


def test_kernels_in_the_interpreter() -> None:
    folder = Path(__file__).parent / "interpreted"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
