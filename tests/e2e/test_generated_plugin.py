"""The plugin that `dgpp new-plugin` writes, a hybrid with a drafter, served: drafting changes the speed and no text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PICKS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 4})
PROMPTS = ("colors", "hello hello hello hello", "Tell me how the sea is made, and why. " * 3)


@pytest.fixture(scope="module")
def package(dgpp: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated package with the metadata that an installer would add: on the path it is installed."""
    folder = tmp_path_factory.mktemp("generated")
    dgpp("new-plugin", "toy", "--dir", str(folder))
    info = folder / "dgpp-toy" / "dgpp_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dgpp-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[dgpp.plugins]\ntoy = dgpp_toy\n")
    return info.parent


@pytest.fixture(scope="module")
def checkpoint(dgpp: Callable[..., str], package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of its model."""
    folder = tmp_path_factory.mktemp("synth") / "toy"
    dgpp("synth", "toy", "--tiny", str(folder), PYTHONPATH=str(package))
    return folder


@pytest.mark.slow
def test_drafting_changes_no_text(serve: Any, package: Path, checkpoint: Path) -> None:
    requests = [{"prompt": prompt, "max_tokens": 48, "ignore_eos": True} | pick for prompt in PROMPTS for pick in PICKS]

    def replies(*options: str) -> tuple[list[Any], dict[str, int]]:
        """The replies alone, and again all at once; and what was drafted for them."""
        arguments = ("--plugin=toy", f"--checkpoint={checkpoint}", *options)
        with serve(*arguments, PYTHONPATH=str(package)) as running, ThreadPoolExecutor(len(requests)) as pool:
            alone = [running.post("completions", **request)["choices"] for request in requests]
            together = list(pool.map(lambda request: running.post("completions", **request)["choices"], requests))
            running.await_idle()
            assert together == alone
            drafted: dict[str, int] = running.metrics()["scheduler"]["spec_decode"]
            return alone, drafted

    plain, none_drafted = replies("--no-mtp")
    drafted, counts = replies()
    assert drafted == plain
    assert len({str(reply) for reply in plain}) == len(requests)
    assert none_drafted["num_draft_tokens_total"] == none_drafted["num_accepted_tokens_total"] == 0
    assert 0 < counts["num_accepted_tokens_total"] <= counts["num_draft_tokens_total"]
