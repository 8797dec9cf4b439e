"""Processes that end with the one that started them: ``python -m dgpp_core.host.child PID MODULE ARGUMENTS``.

One that is killed can tell nobody, and a connection that closes is a sign only where no other process holds its end and
somebody reads. So every process that dgpp starts asks the kernel, before it imports anything that takes time, to be
killed when its parent ends. The kernel takes the *thread* that started it for the parent: let it live as long.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
PROGRAM = "--program"
"""In place of a module: what follows is the command line of any program."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a Python module as a child of this process, which ends with it."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def program_command(program: str, *arguments: str) -> list[str]:
    """The same for any other program; the status is 127 where it cannot be run."""
    return [sys.executable, "-m", __name__, str(os.getpid()), PROGRAM, program, *arguments]


def end_with(parent: int) -> None:
    """Have this process killed when ``parent``, which started it, ends; at once where it has ended already.

    Only Linux does so; elsewhere a child that outlives a killed parent has to be ended by hand.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def main(argv: Sequence[str]) -> None:
    """Become the child that ``argv`` describes: the parent's process id, a module or `PROGRAM`, arguments."""
    parent, what, *arguments = argv
    end_with(int(parent))
    if what != PROGRAM:
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    try:
        os.execvp(arguments[0], arguments)
    except OSError as error:
        print(f"{arguments[0]} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
