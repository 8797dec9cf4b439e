"""Twenty seconds of everything against a real service of a tiny model; `benchmarks/soak.py` does it for longer."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from dgpp_core.testing.soak import CANCELLED, Soak, slope
from dgpp_core.testing.tiny_service import MODEL, tiny_service

SECONDS = 20.0


@pytest.mark.slow
def test_many_kinds_of_requests_and_clients_that_leave() -> None:
    pytest.importorskip("dgpp_glm")
    with tiny_service("glm47") as service:
        soak = Soak(service, MODEL, time.monotonic, random.Random(1), tools=True, prompt_words=150)
        report = asyncio.run(soak.run(SECONDS, clients=12))
        service.process.terminate()
        assert service.process.wait(60) == 0, "an orderly end"
    assert not report.errors
    assert not any(report.counters.values()), report.counters
    left = report.requests.pop("left")
    assert all(count for count in report.requests.values())
    asked = sum(report.requests.values())
    assert 0 < left < 2 * CANCELLED * asked
    assert report.judged


def test_the_slope_of_memory() -> None:
    assert slope([(0, 5), (1, 7), (2, 9)]) == pytest.approx(2)
    assert slope([(0, 1), (1, 2), (2, 1)]) == pytest.approx(0)
    assert slope([(3, 9)]) == 0
