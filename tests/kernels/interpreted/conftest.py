"""These tests need a process of their own; `tests/kernels/test_interpreted.py` starts it."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if "interpreted" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="test_interpreted.py runs it with TRITON_INTERPRET=1"))
