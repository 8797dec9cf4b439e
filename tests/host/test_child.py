"""Processes that end with the one that started them, whoever else holds their connections."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dgpp_core.host.child import PROGRAM, module_command, program_command

SECONDS = 5.0
"""The kernel takes a moment; the rest is for a machine that does other things too."""
STARTS = """
import socket, subprocess, sys, time
from dgpp_core.host.child import module_command, program_command

ours, theirs = socket.socketpair()
ours.set_inheritable(True)
sibling = subprocess.Popen(["sleep", "30"], close_fds=False)  # keeps our end open when we are gone
reads = program_command(sys.executable, "-c", "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)",
                        str(theirs.fileno()))
waits = subprocess.Popen(reads, pass_fds=[theirs.fileno()])
sleeps = subprocess.Popen(program_command("sleep", "60"))
print(sibling.pid, waits.pid, sleeps.pid, flush=True)
time.sleep(60)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")


def test_children_end_with_a_killed_parent_although_a_sibling_keeps_their_connection_open() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        sibling, *children = map(int, parent.stdout.readline().split())
        time.sleep(0.3)
        assert all(alive(pid) for pid in children)
        parent.kill()
        end = time.monotonic() + SECONDS
        while any(alive(pid) for pid in children):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert alive(sibling), "it was started otherwise"
        os.kill(sibling, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_whose_parent_has_ended_before_it_asks_goes_at_once() -> None:
    line = program_command("echo", "still here")
    line[line.index(str(os.getpid()))] = "1"
    assert run(line) == (-signal.SIGKILL, "", "")


def test_a_module_and_a_program_get_their_arguments_and_their_status_is_the_childs(tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text("import sys\nprint(__name__, sys.argv[1:], flush=True)\nsys.exit(7)\n")
    code, out, _ = run(module_command("said", "a b", "--c"), cwd=tmp_path)
    assert (code, out) == (7, "__main__ ['a b', '--c']\n")
    assert run(program_command("sh", "-c", "echo $0; exit 3", PROGRAM))[:2] == (3, f"{PROGRAM}\n")
    code, out, said = run(program_command("/nonexistent"))
    assert (code, out, said) == (127, "", "/nonexistent cannot be run: No such file or directory\n")


def run(line: list[str], cwd: Path | None = None) -> tuple[int, str, str]:
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=cwd)
    return done.returncode, done.stdout, done.stderr
