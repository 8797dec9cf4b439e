"""Starting a service again whose engine failed, with the same configuration and a new epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.server.options import ServeOptions

PAUSE_S = 1.0
"""Between two starts, so that one that fails at once does not spin."""
_log = logging.getLogger("dgpp.server")


class Relaunch:
    """What is served now, and what to serve next.

    Args:
        resolve: the options of an epoch, resolved anew from everything that they come from.
        times: relaunches that are allowed.
        elsewhere: other ranks are started elsewhere, so that they cannot be started again from here.

    Attributes:
        options: those to serve now.

    Raises:
        ConfigError: a relaunch is asked of a world whose ranks are started elsewhere.
    """

    def __init__(
        self, resolve: Callable[[int], ServeOptions], epoch: int, times: int, *, elsewhere: bool, pause: float = PAUSE_S
    ) -> None:
        if times and elsewhere:
            raise ConfigError(
                "ranks that are started elsewhere cannot be started again from here", where="--relaunch",
                hint="leave it to whatever starts them, with the next --epoch for all",
            )  # fmt: skip
        self._resolve, self._epoch, self._left, self._pause = resolve, epoch, times, pause
        self.options = resolve(epoch)

    def again(self) -> bool:
        """Get ready for the next start; whether there is one.

        Raises:
            ConfigError: the configuration is not that of the first start any more: every difference is named.
        """
        if not self._left:
            return False
        self._left -= 1
        self._epoch += 1
        found, expected = self._resolve(self._epoch), _at_epoch(self.options, self._epoch)
        if differences := _differences(found, expected):
            raise ConfigError(
                "the configuration has changed since the start", where=", ".join(differences),
                found="; ".join(f"{name}: {_shown(found, name)}" for name in differences),
                expected="; ".join(f"{name}: {_shown(expected, name)}" for name in differences),
                hint="start it by hand, so that the change is meant",
            )  # fmt: skip
        self.options = found
        _log.warning("starting again: epoch %d, %d more times", self._epoch, self._left)
        time.sleep(self._pause)
        return True


def _at_epoch(options: ServeOptions, epoch: int) -> ServeOptions:
    if options.world is None:
        return options
    return msgspec.structs.replace(options, world=msgspec.structs.replace(options.world, epoch=epoch))


def _differences(found: ServeOptions, expected: ServeOptions) -> list[str]:
    return [name for name in ServeOptions.__struct_fields__ if getattr(found, name) != getattr(expected, name)]


def _shown(options: ServeOptions, name: str) -> str:
    value = getattr(options, name)
    return value.decode() if isinstance(value, bytes) else str(value)
