"""YaRN for Qwen3.8-Flash-Next: what a config.json or a deployment says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import refuse

KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attn_factor", "mrope_cache_factor")
"""Of a deployment's ``rope_scaling``, beside its type."""
_PLACE = "rope_parameters"


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """How the rotary embedding is stretched; see `dgpp_core.ops.rope.yarn_frequencies`.

    Attributes:
        positions: the ceiling, ``factor`` times the trained positions.
        length: positions between whose turns the frequencies go over: the trained ones, or some engines' multiple.
        scale: of cosines and sines; None derives it from ``factor``.
        attention: what a derived one is multiplied by.
    """

    factor: float
    positions: int
    length: float
    fast: float
    slow: float
    scale: float | None
    attention: float


def read_yarn(parameters: Mapping[str, Any]) -> Yarn | None:
    """Of ``rope_parameters``; None where nothing is stretched.

    Raises:
        ConfigError: naming the key whose value is not supported.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise refuse(f"{_PLACE}.rope_type", kind, "'default' or 'yarn'")
    for key in ("mscale", "mscale_all_dim"):
        if parameters.get(key) is not None:
            raise refuse(f"{_PLACE}.{key}", parameters[key], "no such key")
    if parameters.get("truncate", True) is not True:
        raise refuse(f"{_PLACE}.truncate", parameters["truncate"], "true")
    trained, factor = _number(parameters, "original_max_position_embeddings"), _number(parameters, "factor")
    given = None if parameters.get("attention_factor") is None else _number(parameters, "attention_factor")
    return Yarn(
        factor=factor,
        positions=int(trained * factor),
        length=trained * _number(parameters, "mrope_cache_factor", 1.0),
        fast=_number(parameters, "beta_fast", 32.0),
        slow=_number(parameters, "beta_slow", 1.0),
        scale=given,
        attention=_number(parameters, "attn_factor", 1.0),
    )


def rescale(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with a deployment's ``rope_scaling``, in place of what it says itself."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or not isinstance(own := text.get(_PLACE), Mapping):
        raise refuse(f"text_config.{_PLACE}", None, "an object: there is nothing to stretch")
    kept = {key: value for key, value in own.items() if key not in (*KEYS, "attention_factor")}
    stretched = {**kept, "rope_type": "yarn", **{key: scaling[key] for key in KEYS if key in scaling}}
    return {**raw, "text_config": {**text, _PLACE: stretched}}


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
        raise refuse(f"{_PLACE}.{key}", value, "a positive number")
    return float(value)
