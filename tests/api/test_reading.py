"""What readers of config.json share refuses by the key, as it lies in the file."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import pytest

from dgpp_core.api import ConfigError, encoder_section, end_tokens, read_section, require_values


class Section(msgspec.Struct):
    depth: int = 1
    hidden_size: int = 8
    num_heads: int = 2
    out_hidden_size: int = 16
    eps: float = 1e-6
    act: str = "silu"


def refused(raw: dict[str, Any], token: Any = 3) -> str:
    """Where the encoder of a config is refused; empty where it is not."""
    try:
        encoder_section(
            {"vision_config": raw, "image_token_id": token}, Section, positive=("eps",), only={"act": "silu"}, width=16,
            vocab=4,
        )  # fmt: skip
    except ConfigError as error:
        return error.where
    return ""


def test_end_tokens() -> None:
    assert [end_tokens(found) for found in (None, 7, [7, 8], [])] == [(), (7,), (7, 8), ()]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_number_that_is_not_positive_is_named_where_it_lies(value: float) -> None:
    with pytest.raises(ConfigError, match=r"text_config\.eps") as caught:
        require_values(Section(eps=value), positive=("depth", "eps"), within="text_config.")
    assert (caught.value.where, caught.value.found) == ("text_config.eps", repr(value))


def test_a_section_of_another_kind_says_what_it_should_have_been() -> None:
    with pytest.raises(ConfigError, match="does not describe a Foo model") as caught:
        read_section({"depth": "x"}, Section, "a Foo model")
    assert "--plugin" in caught.value.hint


class Inner(msgspec.Struct):
    width: int
    sizes: list[int] = []
    count: Annotated[int, msgspec.Meta(gt=0)] = 1


class Outer(msgspec.Struct):
    text_config: Inner
    groups: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("raw", "found", "expected"),
    [
        ({}, "no such key", "the key text_config"),
        ({"text_config": {}}, "no such key", "the key text_config.width"),
        ({"text_config": 3}, "text_config: 3", "text_config: object"),
        ({"text_config": {"width": "64"}}, "text_config.width: '64'", "text_config.width: int"),
        ({"text_config": {"width": ["x" * 99]}}, "text_config.width: array", "text_config.width: int"),
        ({"text_config": {"width": 1, "sizes": [1, None]}}, "text_config.sizes[1]: None", "text_config.sizes[1]: int"),
        ({"text_config": {"width": 1, "count": 0}}, "text_config.count: 0", "text_config.count: int >= 1"),
        ({"text_config": {"width": 1}, "groups": {"a": {}}}, "no such key", "the key groups[...].width"),
        (
            {"text_config": {"width": 1}, "groups": {"a": {"width": 1.5}}},
            "groups[...].width: float",
            "groups[...].width: int",
        ),
        ([], "[]", "object"),
    ],
)
def test_what_a_section_has_and_what_it_should_have_are_named_by_the_key(raw: Any, found: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_section(raw, Outer, "a Foo model")
    assert (caught.value.where, caught.value.found, caught.value.expected) == ("config.json", found, expected)


def test_a_part_of_the_file_is_named_with_its_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        read_section({"width": None}, Inner, "a part", "parts.first")
    assert (caught.value.where, caught.value.found) == ("parts.first", "parts.first.width: None")
    with pytest.raises(ConfigError) as caught:
        read_section({}, Inner, "a part", "parts.first")
    assert caught.value.expected == "the key parts.first.width"


def test_an_encoder() -> None:
    assert refused({}) == ""
    for key, value in (
        ("depth", 0),
        ("depth", 1025),
        ("num_heads", 3),
        ("out_hidden_size", 8),
        ("eps", 0.0),
        ("act", ""),
    ):
        assert refused({key: value}) == f"vision_config.{key}"
    assert refused({"hidden_size": 12}) == "vision_config.num_heads"
    assert refused({"depth": "x"}) == "vision_config"
    for token in (None, -1, 4, True, "x"):
        assert refused({}, token) == "image_token_id"
