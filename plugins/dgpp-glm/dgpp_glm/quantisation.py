"""``quantization_config`` of a GLM checkpoint: how each of its matrices is stored."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import ConfigError

WHERE = "quantization_config"


class Quantisation(msgspec.Struct, frozen=True):
    """Which matrices are stored in another form than dense.

    Attributes:
        storage: of the quantised matrices, a name of `dgpp_core.formats.storage`.
        excluded: module names or shell-style patterns of matrices that stay dense.
    """

    storage: str = "dense"
    excluded: tuple[str, ...] = ()

    def of(self, module: str) -> str:
        """Storage of the matrix of ``module``, for example ``model.layers.3.mlp.experts.0.up_proj``.

        An excluded name also covers the modules below it.
        """
        return "dense" if self.excluded and _pattern(self.excluded).match(module) else self.storage


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """All names as one expression: a release may list a hundred, and has 40,000 matrices."""
    return re.compile("|".join(rf"{fnmatch.translate(name)}|{re.escape(name)}\." for name in names))


class _Weights(msgspec.Struct, frozen=True, kw_only=True):
    num_bits: int | None = None
    type: str | None = None
    group_size: int | None = None


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    weights: _Weights = _Weights()


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


def read_quantisation(raw: Mapping[str, Any] | None) -> Quantisation:
    """Check and read the section; without one everything is dense.

    Raises:
        ConfigError: naming the key whose value is not supported.
    """
    if raw is None:
        return Quantisation()
    try:
        c = msgspec.convert(raw, _Json)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {WHERE} cannot be read", where=WHERE, found=str(error)) from error
    if c.quant_method == "fp8":
        return _fp8(c)
    if c.quant_method == "modelopt":
        return _modelopt(c)
    raise _refuse("quant_method", c.quant_method, "'fp8' or 'modelopt'")


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
        w = group.weights
        if (w.num_bits, w.type, w.group_size) != (4, "float", 16):
            found = f"{w.num_bits} bits, {w.type}, group {w.group_size}"
            raise _refuse(f"config_groups.{name}.weights", found, "4 bits, float, group 16")
    return Quantisation("nvfp4", (*(c.ignore or ()), *(c.exclude_modules or ())))


def _refuse(key: str, found: object, expected: str) -> ConfigError:
    where = f"{WHERE}.{key}"
    return ConfigError(f"config.json: {where} is not supported", where=where, found=repr(found), expected=expected)
