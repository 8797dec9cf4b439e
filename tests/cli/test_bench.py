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


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(command, [*arguments, "--plugin", "smollm2", "--device", "cpu"])
    assert done.exit_code == code, done.output
    return done.output


def test_decode_tells_bytes_floor_and_what_was_achieved(folder: Path) -> None:
    source = ("--checkpoint", str(folder))
    arguments = ("decode", *source, "--streams", "1,2", "--streams", "2", "--context", "40", "--steps", "4")
    report = json.loads(run(*arguments, "--json"))
    assert list(report["decode"]) == ["1", "2"]
    assert {"model", "card", "layers", "format", "versions", "command"} <= report.keys()
    for streams, row in report["decode"].items():
        assert row["streams"] == int(streams)
        assert row["context"] == 40
        assert row["floor_ms"] == pytest.approx(row["bytes"] / report["read_bandwidth_gb_s"] / 1e6)
        assert row["share"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])
        assert len(row["runs_ms"]) == 3
        assert row["tokens_per_step"] == 1
    one, two = (report["decode"][n]["bytes"] for n in ("1", "2"))
    # Two layers of keys and values, two heads of 16 float32, for 40 tokens of another stream.
    assert two - one == 40 * 2 * 2 * 2 * 16 * 4
    assert "floor of the step" in run(*arguments)


def test_steps_may_outnumber_the_context(folder: Path) -> None:
    """Room is taken for all that is measured, however long."""
    arguments = ("--streams", "1", "--context", "8", "--steps", "160", "--runs", "1", "--json")
    row = json.loads(run("decode", "--checkpoint", str(folder), *arguments))["decode"]["1"]
    assert len(row["runs_ms"]) == 1
    assert row["context"] >= 80


def test_prefill_compares_cold_with_cached(folder: Path) -> None:
    arguments = ("prefill", "--checkpoint", str(folder), "--tokens", "100,200", "--runs", "2")
    report = json.loads(run(*arguments, "--json"))["prefill"]
    assert list(report) == ["100", "200"]
    assert report["200"]["cached_tokens"] == 192
    assert report["200"]["ratio"] == pytest.approx(report["200"]["cached_ms"] / report["200"]["ms"])
    assert "cached" in run(*arguments)


def test_random_weights_need_no_checkpoint_and_say_what_they_are() -> None:
    arguments = ("decode", "--random", "--layers", "1", "--streams", "1", "--steps", "2", "--context", "8")
    report = json.loads(run(*arguments, "--format", "bf16", "--json"))
    assert (report["layers"], report["format"]) == (1, "bf16")
    # SmolLM2-135M: a layer of 3.5 M parameters and the output head, in float32, and the rows of 8 tokens.
    layer, head = 576 * (576 + 2 * 192 + 576 + 3 * 1536) + 2 * 576, 49152 * 576 + 576
    assert report["decode"]["1"]["bytes"] == pytest.approx(4 * (layer + head) + 8 * 2 * 3 * 64 * 4, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("prefill", "--tokens", "2048"), "exceed the context of 2048"),
        (("decode", "--context", "3000"), "exceed the context of 2048"),
        (("prefill", "--tokens", str(10**30)), "kv_capacity"), (("decode", "--streams", str(10**9)), "max_concurrency"),
        (("decode", "--mtp-depth", "1"), "--mtp-depth"), (("decode", "--accept-rate", "0.5"), "--accept-rate"),
        (("decode", "--accept-rate", "nan"), "--accept-rate"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_do_is_not_measured(folder: Path, arguments: tuple[str, ...], named: str) -> None:
    assert named in run(*arguments, "--checkpoint", str(folder), "--runs", "1", code=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("decode", "--layers", "1"), "--layers"), (("decode", "--format", "bf16"), "--format"),
        (("decode", "--random", "--checkpoint", "x"), "--checkpoint"), (("decode", "--streams", "1,0"), "1,0"),
        (("decode", "--random", "--layers", "0"), "--layers"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_by_name(arguments: tuple[str, ...], named: str) -> None:
    assert named in run(*arguments, code=2)


def test_serve_measures_a_service_without_a_model() -> None:
    done = CliRunner().invoke(command, ["serve", "--fake", "--streams", "4", "--max-tokens", "30", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)["serve"]
    # A chunk for the role, one a token, one for the reason it ended.
    assert (report["streams"], report["chunks"]) == (4, 4 * 32)
    assert report["chunks_per_second"] == pytest.approx(report["chunks"] / report["seconds"])
    assert report["writes"] <= report["chunks"] + 2 * 4  # headers and the end may come by themselves
    refused = CliRunner().invoke(command, ["serve", "--step-ms", "1"])
    assert refused.exit_code == 2
    assert "--fake" in refused.output
