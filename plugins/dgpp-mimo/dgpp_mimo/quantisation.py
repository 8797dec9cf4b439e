"""``quantization_config`` of a MiMo checkpoint: FP8 in blocks, and MXFP4 for the experts."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import read_section, refuse

WHERE = "quantization_config"


class Quantisation(msgspec.Struct, frozen=True):
    """How matrices are stored.

    Attributes:
        experts: storage of the routed experts' matrices.
        others: storage of the attention's and the dense layers' matrices.
        excluded: module names or shell-style patterns of matrices that stay dense. The draft blocks are called
            ``model.decoder`` there.
    """

    experts: str = "dense"
    others: str = "dense"
    excluded: tuple[str, ...] = ()

    def of(self, module: str) -> str:
        """Storage of the matrix of ``module``, for example ``model.layers.3.mlp.experts.0.up_proj``."""
        listed = re.sub(r"^model\.mtp\.layers\.\d+", "model.decoder", module)
        if self.excluded and _pattern(self.excluded).match(listed):
            return "dense"
        return self.experts if ".experts." in module else self.others


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(rf"{fnmatch.translate(name)}|{re.escape(name)}\." for name in names))


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    quant_method: str
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    store_dtype: str | None = None
    mxfp4_block_size: int = 32
    ignored_layers: list[str] | None = None


def read_quantisation(raw: Mapping[str, Any] | None) -> Quantisation:
    """Check and read the section; without one everything is dense.

    Raises:
        ConfigError: naming the key whose value is not supported.
    """
    if raw is None:
        return Quantisation()
    c = read_section(raw, _Json, "a known quantisation", WHERE)
    for key, only in (("quant_method", "fp8"), ("fmt", "e4m3"), ("weight_block_size", [128, 128])):
        if (value := getattr(c, key)) != only:
            raise refuse(f"{WHERE}.{key}", value, repr(only))
    if c.store_dtype not in (None, "mxfp4"):
        raise refuse(f"{WHERE}.store_dtype", c.store_dtype, "'mxfp4' or none")
    if c.store_dtype and c.mxfp4_block_size != 32:
        raise refuse(f"{WHERE}.mxfp4_block_size", c.mxfp4_block_size, "32")
    experts = "mxfp4_u8" if c.store_dtype else "fp8_block"
    return Quantisation(experts, "fp8_block", tuple(c.ignored_layers or ()))
