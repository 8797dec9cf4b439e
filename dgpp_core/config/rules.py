"""What each key of the site file may hold: a rule turns text into a value or raises ValueError with what is allowed."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dgpp_core.config.addresses import is_ipv6
from dgpp_core.config.fabric import WANTED

Rule = Callable[[str], Any]


def matching(pattern: str, meaning: str) -> Rule:
    """Text that matches ``pattern`` as a whole."""

    def rule(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(meaning)
        return text

    return rule


def port(text: str) -> int:
    """A TCP port."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise ValueError("a port, 1..65535")
    return int(text)


def ip_address(text: str) -> str:
    """An IPv4 or IPv6 address, as it is usually written."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("an IP address such as 127.0.0.1, 0.0.0.0, ::1 or ::") from None


def node_path(text: str) -> str:
    """A path that means the same on every node."""
    if not re.fullmatch(r"(/|~/)[A-Za-z0-9_./+@=-]*", text) or ".." in text.split("/"):
        raise ValueError("an absolute path or one below ~/, of letters, digits and _./+@=-, without ..")
    return text


def rooted_path(text: str) -> str:
    """An absolute path, or one below the home folder."""
    if not text.startswith(("/", "~/")):
        raise ValueError("an absolute path, or one below ~/")
    return text


def words(pattern: str, most: int, meaning: str) -> Rule:
    """Distinct words separated by spaces, 1 to ``most`` of them."""

    def rule(text: str) -> tuple[str, ...]:
        found = tuple(text.split())
        if not 1 <= len(found) <= most or any(re.fullmatch(pattern, word) is None for word in found):
            raise ValueError(meaning)
        if len(set(found)) != len(found):
            raise ValueError("each entry once")
        return found

    return rule


def nodes(text: str) -> tuple[str, ...]:
    """Hosts in rank order."""
    meaning = "different host names or addresses, separated by spaces, rank 0 first"
    found: tuple[str, ...] = words(r"[A-Za-z0-9:][A-Za-z0-9_.:%-]*", 1 << 16, meaning)(text)
    if any(not is_ipv6(word) for word in found if ":" in word or "%" in word):
        raise ValueError(meaning)
    return found


def gid_indices(text: str) -> tuple[int, ...]:
    """One index a device."""
    found = text.split()
    if not found or any(not re.fullmatch(r"[0-9]{1,3}", word) or int(word) > 255 for word in found):
        raise ValueError("one index, 0..255, for each of DGPP_ROCE_DEVICES")
    return tuple(map(int, found))


def overrides(text: str) -> Mapping[str, Mapping[str, str]]:
    """A JSON object of objects of single-line strings; `dgpp_core.config.site` checks the keys."""
    try:
        found = msgspec.json.decode(text, type=dict[str, dict[str, str]])
    except msgspec.MsgspecError:
        raise ValueError("a JSON object of objects of strings, keyed by node") from None
    if any(len(value.splitlines()) > 1 for inner in found.values() for value in inner.values()):
        raise ValueError("single-line strings as values")
    return found


_DEVICES = "one or two different verbs device names"

NODE_RULES: Mapping[str, Rule] = {
    "DGPP_ROCE_DEVICES": words(r"[A-Za-z0-9_.:-]+", 2, _DEVICES),
    "DGPP_ROCE_GID_INDICES": gid_indices,
    "HF_HUB_CACHE": rooted_path,
    "DGPP_RESIDENT_CACHE_DIR": rooted_path,
    "DGPP_LOG_LEVEL": matching("debug|info|warn|error", "debug, info, warn or error"),
    "DGPP_MLOCK": matching("on|off", "on or off"),
}
"""Keys that a single node may have its own value of."""

RULES: Mapping[str, Rule] = {
    "DGPP_NODES": nodes,
    "DGPP_SSH_USER": matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?", "a login name"),
    "DGPP_SSH_CONFIG": rooted_path,
    "DGPP_PYTHON": rooted_path,
    "DGPP_CLUSTER_CONFIG": matching(r".+", "the path of a deployment file"),
    "DGPP_HTTP_PORT": port,
    "DGPP_HTTP_BIND": ip_address,
    "DGPP_API_KEY_FILE": rooted_path,
    "DGPP_BUS": matching("|".join(WANTED), "one of " + ", ".join(WANTED)),
    "DGPP_FABRIC_PORT": port,
    "DGPP_JOURNAL_PORT": port,
    "DGPP_LOG_DIR": matching(r".+", "a path"),
    "DGPP_STAGE_DIR": node_path,
    "DGPP_RELEASE_DIR": node_path,
    "DGPP_DATA_DIR": matching(r".+", "a path"),
    "HF_HOME": rooted_path,
    "DGPP_NODE_OVERRIDES": overrides,
    **NODE_RULES,
}
"""Every key of the site file."""
