"""`dgpp bench` measures a real, tiny model and prints text and JSON."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.bench import command
from dgpp_core.host.loading import load_plugins


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("dgpp_llama")
    model, path = load_plugins(environ={}).model("smollm2"), tmp_path_factory.mktemp("tiny")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, path, seed=4)
    return path


def run(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(
        command, [*arguments, "--plugin", "smollm2", "--checkpoint", str(folder), "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_decode_tells_bytes_floor_and_what_was_achieved(folder: Path) -> None:
    arguments = ("decode", "--streams", "1", "--streams", "2", "--prompt", "20", "--steps", "4")
    report = json.loads(run(folder, *arguments, "--json"))
    assert list(report["decode"]) == ["1", "2"]
    for streams, row in report["decode"].items():
        assert row["streams"] == int(streams)
        assert row["floor_ms"] == pytest.approx(row["bytes"] / report["read_bandwidth_gb_s"] / 1e6)
        assert row["share"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])
    one, two = (report["decode"][n]["bytes"] for n in ("1", "2"))
    # Two layers of keys and values, two heads of 16 float32, for 20 prompt tokens and half of the steps.
    assert two - one == 22 * 2 * 2 * 2 * 16 * 4
    assert "of the step" in run(folder, *arguments)


def test_prefill_compares_cold_with_cached(folder: Path) -> None:
    report = json.loads(run(folder, "prefill", "--tokens", "200", "--json"))["prefill"]["200"]
    assert report["cached_tokens"] == 192
    assert report["ratio"] == pytest.approx(report["cached_ms"] / report["cold_ms"])
    assert "cached" in run(folder, "prefill", "--tokens", "200")
