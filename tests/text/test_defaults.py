import json
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.api.errors import ConfigError
from dgpp_core.text.defaults import GenerationDefaults, read_generation_defaults

GREEDY = GenerationDefaults(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, eos_ids=(2,)
)  # fmt: skip


def written(folder: Path, value: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(value))
    return folder


def test_no_file_is_greedy(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path, (2,)) == GREEDY


@pytest.mark.parametrize(
    "value",
    [{}, {"eos_token_id": None, "temperature": None}, {"do_sample": False, "temperature": 0.7}, {"pad_token_id": 9}],
)
def test_a_file_without_sampling_is_greedy(tmp_path: Path, value: dict[str, Any]) -> None:
    assert read_generation_defaults(written(tmp_path, value), (2,)) == GREEDY


def test_sampling_fields_and_end_ids(tmp_path: Path) -> None:
    value = {
        "do_sample": True, "temperature": 1, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
        "eos_token_id": [7, 2, 7],
    }  # fmt: skip
    assert read_generation_defaults(written(tmp_path, value), (2, 3)) == GenerationDefaults(
        temperature=1.0, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05, eos_ids=(7, 2, 3)
    )


@pytest.mark.parametrize(
    ("value", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"top_p": 0.9}, 1.0),
        ({"repetition_penalty": 1.1}, 0.0),
    ],
)
def test_whether_a_file_samples(tmp_path: Path, value: dict[str, Any], temperature: float) -> None:
    assert read_generation_defaults(written(tmp_path, value), ()).temperature == temperature


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", "1"), ("temperature", True), ("top_p", 1.5), ("top_p", -1),
        ("top_k", 2.5), ("top_k", -1), ("min_p", 2), ("repetition_penalty", 0),
        ("do_sample", "yes"), ("eos_token_id", "</s>"), ("eos_token_id", [1, None]), ("eos_token_id", -1),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_generation_defaults(written(tmp_path, {name: value}), ())
    assert caught.value.where.startswith(f"{tmp_path / 'generation_config.json'}: {name}")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"temperature": NaN}'])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(raw)
    with pytest.raises(ConfigError, match="malformed"):
        read_generation_defaults(tmp_path, ())
