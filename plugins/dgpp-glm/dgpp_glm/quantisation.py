"""``quantization_config`` of a GLM checkpoint: how each of its matrices is stored."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dgpp_core.api import ConfigError, read_section
from dgpp_core.formats.levels import LEVELS

WHERE = "quantization_config"
REGEX = "re:"


class Rule(msgspec.Struct, frozen=True):
    """The storage of the matrices that one of ``names`` means."""

    names: tuple[str, ...]
    storage: str


class Quantisation(msgspec.Struct, frozen=True):
    """Which matrices are stored in another form than dense.

    A name is a module's, which also covers the modules below it, a shell-style pattern, or ``re:`` and a regular
    expression that fits the beginning of a module's name.

    Attributes:
        storage: of the quantised matrices that no rule is about, a name of `dgpp_core.formats.storage`.
        excluded: names of matrices that stay dense.
        rules: the first that fits counts.
    """

    storage: str = "dense"
    excluded: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def of(self, module: str) -> str:
        """Storage of the matrix of ``module``, for example ``model.layers.3.mlp.experts.0.up_proj``."""
        if self.excluded and _pattern(self.excluded).match(module):
            return "dense"
        fitting = (rule.storage for rule in self.rules if _pattern(rule.names).match(module))
        return next(fitting, self.storage)


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """All names as one expression: a release may list a hundred, and has 40,000 matrices."""
    return re.compile("|".join(map(_expression, names)))


def _expression(name: str) -> str:
    if name.startswith(REGEX):
        return f"(?:{name.removeprefix(REGEX)})"
    return rf"{fnmatch.translate(name)}|{re.escape(name)}\."


class _Weights(msgspec.Struct, frozen=True, kw_only=True):
    num_bits: int | None = None
    type: str | None = None
    group_size: int | None = None
    strategy: str | None = None
    symmetric: bool | None = None
    actorder: str | bool | None = None


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    weights: _Weights = _Weights()
    targets: list[str] = []
    format: str | None = None
    input_activations: dict[str, Any] | None = None


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    quant_method: str
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    modules_to_not_convert: list[str] | None = None
    quant_algo: str | None = None
    group_size: int | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None
    config_groups: dict[str, _Group] | None = None
    format: str | None = None
    version: Any = None
    codebook: Any = None
    transform: Any = None


def read_quantisation(raw: Mapping[str, Any] | None, mixtures: Sequence[int] | None = None) -> Quantisation:
    """Check and read the section; without one everything is dense.

    Args:
        mixtures: the layers with experts, for a section that names no modules; None of a model without such a release.

    Raises:
        ConfigError: naming the key whose value is not supported.
    """
    if raw is None:
        return Quantisation()
    c = read_section(raw, _Json, "a known quantisation", WHERE)
    if c.quant_method == "fp8":
        return _fp8(c)
    if c.quant_method == "modelopt":
        return _modelopt(c)
    if c.quant_method == "compressed-tensors":
        return _packed(c)
    if c.quant_method == CODEBOOK["quant_method"] and mixtures is not None:
        return _codebook(c, mixtures)
    known = ["fp8", "modelopt", "compressed-tensors", *([CODEBOOK["quant_method"]] if mixtures is not None else ())]
    hint = f"experts that differ in bits one by one are not served: use {known[-1]}" if c.quant_method == MIXED else ""
    raise _refuse("quant_method", c.quant_method, f"one of {', '.join(known)}", hint)


def _fp8(c: _Json) -> Quantisation:
    if c.fmt != "e4m3":
        raise _refuse("fmt", c.fmt, "'e4m3'")
    if c.weight_block_size != [128, 128]:
        raise _refuse("weight_block_size", c.weight_block_size, "[128, 128]")
    return Quantisation("fp8_block", tuple(c.modules_to_not_convert or ()))


def _modelopt(c: _Json) -> Quantisation:
    if c.quant_algo != "NVFP4":
        raise _refuse("quant_algo", c.quant_algo, "'NVFP4'")
    if c.group_size not in (None, 16):
        raise _refuse("group_size", c.group_size, "16")
    for name, group in (c.config_groups or {}).items():
        _check_weights(name, group.weights, _NVFP4)
    return Quantisation("nvfp4", (*(c.ignore or ()), *(c.exclude_modules or ())))


def _packed(c: _Json) -> Quantisation:
    """Integers in words (compressed-tensors' ``pack-quantized``); each group says for which modules it is."""
    ignored, rules = tuple(c.ignore or ()), []
    for name in ignored:
        _check_expression("ignore", name)
    if not c.config_groups:
        raise _refuse("config_groups", c.config_groups, "a group at least")
    for key, group in c.config_groups.items():
        where, w = f"config_groups.{key}", group.weights
        if (found := group.format or c.format) != "pack-quantized":
            raise _refuse(f"{where}.format", found, "'pack-quantized'")
        if group.input_activations is not None:
            raise _refuse(f"{where}.input_activations", group.input_activations, "null")
        _check_weights(key, w, _PACKED)
        storage = f"int{w.num_bits}_g{w.group_size}"
        for name in group.targets:
            _check_expression(f"{where}.targets", name)
        # The name of torch's class stands for every linear layer.
        rules.append(Rule(tuple("*" if name == "Linear" else name for name in group.targets), storage))
    return Quantisation("dense", ignored, tuple(rules))


CODEBOOK: Mapping[str, Any] = {
    "quant_method": "dgpp_nf4i8", "format": "mixed-codebook-packed", "version": 1, "codebook": list(LEVELS[4]),
    "transform": {"type": "hadamard", "block_size": 32},
}  # fmt: skip
"""Experts in a codebook of 4 bits, attention and shared experts in int8. Neither levels nor turn are read from it: what
it says of them must be what `dgpp_core.formats.codebook` has."""


def _codebook(c: _Json, mixtures: Sequence[int]) -> Quantisation:
    for key in ("format", "version", "codebook", "transform"):
        found = getattr(c, key)
        if found != CODEBOOK[key] and (found is not None or key in ("format", "version")):
            raise _refuse(key, found, repr(CODEBOOK[key]))
    layers = rf"{REGEX}.*layers\.(?:{'|'.join(map(str, mixtures))})\."
    attention = rf"{layers}self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)$"
    return Quantisation(
        rules=(
            Rule((rf"{layers}mlp\.experts\.",), "code4_g128"),
            Rule((attention, rf"{layers}mlp\.shared_experts\."), "int8_g64"),
        )
    )


MIXED = "dgpp_mixed346"
"""Experts of 3, 4 or 6 bits, or integers, as a recipe beside config.json says of each."""

_NVFP4: Mapping[str, Sequence[object]] = {"num_bits": (4,), "type": ("float",), "group_size": (16,)}
_PACKED: Mapping[str, Sequence[object]] = {
    "num_bits": (4, 8), "type": ("int",), "strategy": ("group",), "group_size": (64, 128), "symmetric": (True,),
    "actorder": (None, False, ""),
}  # fmt: skip
"""By key of a group's weights, the values that can be loaded."""


def _check_weights(group: str, weights: _Weights, known: Mapping[str, Sequence[object]]) -> None:
    for key, only in known.items():
        if (found := getattr(weights, key)) not in only:
            raise _refuse(f"config_groups.{group}.weights.{key}", found, " or ".join(map(repr, only)))


def _check_expression(key: str, name: str) -> None:
    if name.startswith(REGEX):
        try:
            re.compile(name.removeprefix(REGEX))
        except re.error as error:
            raise _refuse(key, name, f"a regular expression: {error}") from error


def _refuse(key: str, found: object, expected: str, hint: str = "") -> ConfigError:
    where = f"{WHERE}.{key}"
    what = f"config.json: {where} is not supported"
    return ConfigError(what, where=where, found=repr(found), expected=expected, hint=hint)
