"""``quantization_config`` of a GLM-5.3-Flash checkpoint.

Its releases quantise the same matrices, whatever they list as not converted: that is not read, and a tensor that is
stored in another way is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dgpp_core.api import read_section, refuse
from dgpp_glm.quantisation import REGEX, WHERE, Quantisation, Rule, read_quantisation

_LAYER = r"model\.language_model\.layers\.\d+"
_GATED = "(?:gate|up|down)_proj$"
_EIGHT_BITS = Rule(
    (
        rf"{REGEX}{_LAYER}\.self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)$",
        rf"{REGEX}{_LAYER}\.mlp\.(?:experts\.\d+\.|shared_experts\.)?{_GATED}",
    ),
    "fp8_block",
)
"""The products of latent attention but that which expands latents, and all feed-forwards."""


class _Experts(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    num_bits: int
    group_size: int
    symmetric: bool = True
    scale_dtype: str = "torch.float8_e4m3fn"
    global_scale_dtype: str = "torch.float32"
    tensor_suffixes: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_global_scale")
    layers: tuple[int, ...] | None = None


class _Draft(msgspec.Struct, frozen=True, kw_only=True):
    index: int


class _Mixed(msgspec.Struct, frozen=True, kw_only=True):
    routed_experts: _Experts
    fp8: dict[str, Any]
    mtp_layer: _Draft | None = None


def read_storages(raw: Mapping[str, Any] | None, mixtures: Sequence[int], draft: int) -> Quantisation:
    """Check and read the section; without one everything is dense.

    Args:
        mixtures: numbers of the layers with experts, the draft layer not among them.
        draft: the draft layer's number.

    Raises:
        ConfigError: naming the key whose value is not supported.
    """
    if raw is None:
        return Quantisation()
    match raw.get("quant_method"):
        case "fp8":
            read_quantisation(raw)
            return Quantisation(rules=(_EIGHT_BITS,))
        case "dgpp_mixed":
            return _mixed(raw, mixtures, draft)
    raise refuse(f"{WHERE}.quant_method", raw.get("quant_method"), "'fp8' or 'dgpp_mixed'")


def _mixed(raw: Mapping[str, Any], mixtures: Sequence[int], draft: int) -> Quantisation:
    """Experts in NVFP4, with a scale that divides, in every layer but the draft layer; the rest in 8 bits."""
    c = read_section(raw, _Mixed, "a known quantisation", WHERE)
    known = _Experts(format="nvfp4-pack-quantized", num_bits=4, group_size=16, layers=tuple(mixtures))
    for field in _Experts.__struct_fields__:
        found, only = getattr(c.routed_experts, field), getattr(known, field)
        if found != only and not (field == "layers" and found is None):
            raise refuse(f"{WHERE}.routed_experts.{field}", found, repr(only))
    if c.mtp_layer is not None and c.mtp_layer.index != draft:
        raise refuse(f"{WHERE}.mtp_layer.index", c.mtp_layer.index, str(draft))
    read_storages(c.fp8, mixtures, draft)
    numbers = "|".join(map(str, mixtures))
    layers = _LAYER.replace(r"\d+", f"(?:{numbers})")
    four_bits = Rule((rf"{REGEX}{layers}\.mlp\.experts\.\d+\.{_GATED}",), "nvfp4_ct")
    return Quantisation(rules=(four_bits, _EIGHT_BITS))
