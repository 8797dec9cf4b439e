"""Settings of the whole test run, made before torch is imported; which tests want the machine to themselves."""

import os
from pathlib import Path

import pytest

# Small models gain nothing from threads, and a barrier between threads waits for whoever else has the processor.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ALONE = {f"tests/{part}" for part in ("bus", "cli", "cluster", "docs", "e2e", "launch", "rdma", "server", "testing")}
"""Folders whose tests time something, or start processes that have to answer in time."""
ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what nothing else may run beside."""
    for item in items:
        if "/".join(item.path.relative_to(ROOT).parts[:2]) in ALONE:
            item.add_marker(pytest.mark.alone)
