"""Hosts without machines: network namespaces with one address each, joined by a switch whose cables can be pulled."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from dgpp_core.testing.packet_loss import lossy

T = TypeVar("T")

INTERFACE = "eth0"
_NEW_NETWORK = 0x40000000


def unavailable() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    return "" if os.geteuid() == 0 else "network namespaces need root"


class Hosts:
    """``count`` namespaces. Made by `hosts`.

    Args:
        ipv6: they have addresses of that family alone.

    Attributes:
        names: of the namespaces, by host.
    """

    def __init__(self, count: int, prefix: str, *, ipv6: bool = False) -> None:
        self._ipv6 = ipv6
        self.names = tuple(f"{prefix}-{host}" for host in range(count))
        self._switch = f"{prefix}-switch"

    def address(self, host: int) -> str:
        """A host's address."""
        return f"fd77::{host + 1}" if self._ipv6 else f"10.77.0.{host + 1}"

    def prefix(self, host: int) -> list[str]:
        """What a command line is put behind to run on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self, host: int) -> None:
        """Pull a host's cable."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    @contextlib.contextmanager
    def cut_off(self, host: int) -> Iterator[None]:
        """Pull a host's cable while the block runs."""
        self.cut(host)
        try:
            yield
        finally:
            _ip("-n", self._switch, "link", "set", f"port{host}", "up")

    @contextlib.contextmanager
    def drop(self, host: int, percent: float) -> Iterator[None]:
        """Lose packets to and from a host, so many in a hundred, while the block runs.

        Raises:
            OSError: as `packet_loss.lossy`.
        """
        with contextlib.ExitStack() as stack:
            for name, device in ((self._switch, f"port{host}"), (self.names[host], INTERFACE)):
                both = lossy(device, percent)
                _inside(name, lambda both=both: stack.enter_context(both))  # type: ignore[misc]
            yield

    def inside(self, host: int, work: Callable[[], T]) -> T:
        """What ``work`` returns, run on a host with all threads and processes that it starts; raises what it does."""
        return _inside(self.names[host], work)

    def set_up(self) -> None:
        """Make the namespaces and the cables between them."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge0", "up")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            wide = f"{self.address(host)}/{64 if self._ipv6 else 24}"
            _ip("-n", name, "address", "add", wide, "dev", INTERFACE, *(["nodad"] if self._ipv6 else []))
            _ip("-n", name, "link", "set", INTERFACE, "up")

    def take_down(self) -> None:
        """Remove what is there of them."""
        for name in (*self.names, self._switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


@contextlib.contextmanager
def hosts(count: int, *, ipv6: bool = False) -> Iterator[Hosts]:
    """Hosts for as long as the block runs.

    Args:
        ipv6: as of `Hosts`.

    Raises:
        subprocess.CalledProcessError: the kernel or the user's rights do not allow it; see `unavailable`.
    """
    made = Hosts(count, f"dgpp{os.getpid()}-{threading.get_native_id()}", ipv6=ipv6)
    try:
        made.set_up()
        yield made
    finally:
        made.take_down()


def enter(name: str) -> None:
    """Have the calling thread, and what it starts from now on, be in a namespace; raises `OSError`."""
    with (Path("/run/netns") / name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "a thread cannot enter the namespace")


def _inside(name: str, work: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter(name)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
