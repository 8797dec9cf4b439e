"""Running things on nodes: on this host, or over the OpenSSH client.

The client is a program and no library on purpose: whatever an operator has set up for it (keys, agents, jump hosts,
host certificates) then holds here too, and a refusal can be tried again by hand with the line that the error shows.
"""

from __future__ import annotations

import getpass
import inspect
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from dgpp_core.api.errors import LaunchError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
PYTHON = "python3"
CONNECT_S = 5
COMMAND_S = 25.0
_LOST = 255
"""What ``ssh`` ends with where it, and not the command, has failed."""


class Node(Protocol):
    """A host on which commands are run."""

    @property
    def name(self) -> str:
        """As in the site file."""
        ...

    @property
    def python(self) -> str:
        """What runs `dgpp_core.launch.agent` there."""
        ...

    def command(self, line: Sequence[str]) -> list[str]:
        """What is run on this host so that ``line`` is run on the node."""
        ...


class LocalNode:
    """This host."""

    def __init__(self, name: str) -> None:
        self.name, self.python = name, sys.executable

    def command(self, line: Sequence[str]) -> list[str]:
        """The line itself."""
        return list(line)


class SshNode:
    """Another host.

    Args:
        user: to log in as; empty leaves it to ``ssh``.
        config: a configuration file of ``ssh`` to use instead of the user's; empty for none.
    """

    def __init__(self, name: str, user: str = "", config: str = "") -> None:
        self.name, self.python, self._user, self._config = name, PYTHON, user, config

    def options(self) -> list[str]:
        """The client and its options, without the host: nothing is asked, an unknown host key is a failure."""
        options = [
            "ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3",
        ]  # fmt: skip
        if self._config:
            options += ["-F", self._config]
        return options + (["-l", self._user] if self._user else [])

    def command(self, line: Sequence[str]) -> list[str]:
        """The client, with the line quoted for the node's shell."""
        return [*self.options(), self.name, "--", shlex.join(line)]


def run(node: Node, line: Sequence[str], data: bytes = b"", seconds: float = COMMAND_S) -> bytes:
    """The standard output of a command on a node.

    Raises:
        LaunchError: the node cannot be reached, the command fails or takes longer than ``seconds``.
    """
    command = node.command(line)
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            "a node does not answer", where=node.name, found=f"nothing within {seconds:g} s",
            hint=f"try it by hand: {shlex.join(command[:-1])} true",
        ) from None  # fmt: skip
    except OSError as error:
        raise LaunchError(
            "a command cannot be run", where=f"{node.name}: {command[0]}", found=error.strerror or str(error),
            hint="install the OpenSSH client" if command[0] == "ssh" else "",
        ) from error  # fmt: skip
    if done.returncode == 0:
        return done.stdout
    last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if isinstance(node, SshNode) and done.returncode == _LOST:
        raise LaunchError(
            "a node cannot be reached", where=node.name, found=last,
            expected="a login that needs no password, and a known host key",
            hint=f"try it by hand: {shlex.join(command[:-2])} true",
        )  # fmt: skip
    raise LaunchError("a command failed", where=f"{node.name}: {shlex.join(line)[:200]}", found=last)


def call(node: Node, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """What a function of `dgpp_core.launch.agent` returns on a node.

    Raises:
        LaunchError: as `run`; ``found`` is the exception that the function raised.
    """
    return call_for(COMMAND_S, node, function, *args, **kwargs)


def call_for(seconds: float, node: Node, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """As `call`, within ``seconds``."""
    source = inspect.getsource(sys.modules[function.__module__])
    given = json.dumps([args, kwargs])
    name = getattr(function, "__name__", "")
    last = f"\nprint(json.dumps((lambda given: {name}(*given[0], **given[1]))(json.loads({given!r}))))\n"
    try:
        raw = run(node, [node.python, "-I", "-S", "-"], (source + last).encode(), seconds)
    except LaunchError as error:
        if error.what == "a command failed":
            error = LaunchError(f"a node cannot {name.replace('_', ' ')}", where=node.name, found=error.found)
        raise error from None
    result: R = json.loads(raw)
    return result


def each(nodes: Sequence[T], work: Callable[[T], R]) -> list[R]:
    """``work`` for every one of ``nodes`` at the same time; in their order.

    Raises:
        DgppError: that of the first that failed, after all have ended.
    """
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        return list(pool.map(work, nodes))


def make_nodes(names: Sequence[str], user: str, config: str) -> list[Node]:
    """Rank 0's is this host, each other one is reached over SSH."""
    login = user if user != getpass.getuser() else ""
    return [LocalNode(name) if rank == 0 else SshNode(name, login, config) for rank, name in enumerate(names)]
