"""2,000 damaged request bodies: no 5xx, no hang, and a known request still gets its known answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from dgpp_core.testing.fake_service import TOOL_TEMPLATE
from dgpp_core.testing.fuzz import fuzz_bodies, tool_script
from dgpp_core.testing.tool_replies import dialect


@pytest.fixture(scope="module")
def calling(serve_fake: Any, write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A service that offers everything."""
    markers = ("<think>", "</think>", *dialect("glm").markers)
    folder = write_checkpoint(tmp_path_factory.mktemp("glm"), markers, TOOL_TEMPLATE)
    with serve_fake(tool_script(), model=folder) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_mutated_bodies(fake: Any, calling: Any, shard: int) -> None:
    for running, tools in ((fake, False), (calling, True)):
        statuses = fuzz_bodies(running.url, 250, random.Random(shard), tools=tools)
        assert set(statuses) <= {200, 400, 404}
        assert 0 < statuses[200] < 250
        running.await_idle()
