"""API keys: a file of hashes, and whom a key that a client shows belongs to. Torch-free.

A line of the file is ``sha256:HEX NAME``; empty lines and those that begin with ``#`` are left out. A key is 256 random
bits, so there is no dictionary to try against its hash, and neither salt nor a slow hash would add anything.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dgpp_core.api.errors import ConfigError

PREFIX = "dgpp-"
_LINE = re.compile(r"sha256:([0-9a-f]{64})\s+([A-Za-z0-9][A-Za-z0-9_.@-]{0,63})")
FORM = "sha256:HEX NAME, with a name of 1 to 64 of A-Z a-z 0-9 _ . @ -"

log = logging.getLogger("dgpp.server")


class Key(msgspec.Struct, frozen=True):
    """The SHA-256 of a key, and the name of its holder."""

    digest: bytes
    name: str


def new_key(random_bytes: Callable[[int], bytes]) -> str:
    """A key with 256 random bits."""
    return PREFIX + random_bytes(32).hex()


def hashed(key: bytes) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key).digest()


def parse_keys(text: str, where: str) -> tuple[Key, ...]:
    """The keys of a file's text; ``where`` names it in errors.

    Raises:
        ConfigError: a line that is none, a name or a key that stands there twice.
    """
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        place = f"{where}, line {number}"
        found = _LINE.fullmatch(line)
        if found is None:  # the line is not shown: somebody may have put a key itself there
            raise ConfigError("a line of the key file is not a hashed key", where=place, expected=FORM)
        key = Key(bytes.fromhex(found[1]), found[2])
        if any(key.name == other.name or key.digest == other.digest for other in keys):
            raise ConfigError("a key or its name is twice in the key file", where=place, found=key.name)
        keys.append(key)
    return tuple(keys)


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in ``path``.

    Raises:
        ConfigError: it cannot be read, or `parse_keys` refuses it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = f"make one: dgpp key make NAME --file {path}"
        raise ConfigError("the key file cannot be read", where=str(path), found=str(error), hint=hint) from None
    return parse_keys(text, str(path))


def write_keys(path: Path, keys: Sequence[Key]) -> None:
    """Replace the file in one step, readable by its owner alone.

    Raises:
        ConfigError: it cannot be written.
    """
    lines = [f"sha256:{key.digest.hex()} {key.name}\n" for key in keys]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, text=True)  # of mode 0600
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError("the key file cannot be written", where=str(path), found=str(error)) from None


class KeyRing:
    """The keys of a file as it is now: a key that is added or removed counts from the next request on.

    A file that cannot be read any more changes nothing but the log: the keys that were in it go on.

    Raises:
        ConfigError: as `read_keys`, or there is no key in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._now()
        self._keys = read_keys(path)
        if not self._keys:
            hint = f"make one: dgpp key make NAME --file {path}"
            raise ConfigError("the key file holds no key: nobody could be served", where=str(path), hint=hint)

    def holder(self, key: bytes) -> str | None:
        """Whose key this is. The time does not depend on how much of a key is right, or on which it is."""
        self._refresh()
        digest, found = hashed(key), None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known.name
        return found

    def _now(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)

    def _refresh(self) -> None:
        if (now := self._now()) == self._stamp:
            return
        self._stamp = now
        try:
            self._keys = read_keys(self._path)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error.line())
        else:
            log.info("the API keys were read again: %s", ", ".join(key.name for key in self._keys) or "none is left")
