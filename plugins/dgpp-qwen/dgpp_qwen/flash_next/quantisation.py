"""``quantization_config`` of a Qwen3.8-Flash-Next checkpoint: how it stores its experts and its n-gram table.

The releases quantise nothing else, whatever their lists of excluded modules say: those are not read. A tensor that is
stored in another way is refused by its dtype when the checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import refuse

WHERE = "quantization_config"


class Storages(msgspec.Struct, frozen=True):
    """Storages of what is quantised.

    Attributes:
        experts: of the routed experts of the main layers, a name of `dgpp_core.formats.storage`.
        draft_experts: of the draft layer's.
        table: whether the n-gram table is in 8 bits, with one scale.
    """

    experts: str = "dense"
    draft_experts: str = "dense"
    table: bool = False


_NVFP4: Mapping[str, object] = {"num_bits": 4, "type": "float", "group_size": 16}


def read_storages(raw: Mapping[str, Any] | None) -> Storages:
    """Check and read the section; without one everything is dense.

    Raises:
        ConfigError: naming the key whose value is not supported.
    """
    if raw is None:
        return Storages()
    method = raw.get("quant_method")
    if method == "fp8":
        if (block := raw.get("weight_block_size")) != [128, 128]:
            raise refuse(f"{WHERE}.weight_block_size", block, "[128, 128]")
        return Storages("fp8_block", "fp8_block", True)
    if method == "modelopt":
        if (algorithm := raw.get("quant_algo")) != "NVFP4":
            raise refuse(f"{WHERE}.quant_algo", algorithm, "'NVFP4'")
        groups = raw.get("config_groups") or {}
        for name, group in groups.items() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            found = weights if isinstance(weights, Mapping) else {}
            for key, only in _NVFP4.items():
                if (value := found.get(key)) != only:
                    raise refuse(f"{WHERE}.config_groups.{name}.weights.{key}", value, repr(only))
        return Storages("nvfp4", "fp8_block", True)
    raise refuse(f"{WHERE}.quant_method", method, "'fp8' or 'modelopt'")
