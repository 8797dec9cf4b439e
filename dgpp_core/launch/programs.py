"""Which software ranks run: what is installed for a Python, or a release."""

from __future__ import annotations

import sys

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.resolve import Resolved
from dgpp_core.config.site import Site
from dgpp_core.launch.world import Program

CURRENT = "current"


def choose_program(site: Site, resolved: Resolved, release: str | None) -> Program:
    """The program of a deployment's ranks.

    Args:
        release: goes before the deployment's; ``current`` is the one that was activated last.

    Raises:
        ConfigError: not a version's name.
    """
    python, version = site.python or sys.executable, release or resolved.release
    if not version:
        return Program(python=python)
    if "/" in version or version.startswith("."):
        raise ConfigError("not the name of a release", where="--release", found=version)
    return Program(python=python, release=f"{resolved.paths.release_dir}/{version}")
