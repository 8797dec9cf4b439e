"""Requests whose bytes are damaged, split, cut off or run into each other: no 5xx, no hang, and all is well after."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dgpp_core.testing.fuzz import fuzz_http


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(2))
def test_damaged_requests(fake: Any, shard: int) -> None:
    outcomes = fuzz_http(fake.url, 500, random.Random(shard))
    assert outcomes["200"]
    assert outcomes["400"]
    assert outcomes["left"]
    fake.await_idle()
