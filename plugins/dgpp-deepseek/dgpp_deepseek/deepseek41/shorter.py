"""A DeepSeek-V4.1 config with fewer layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dgpp_core.api import ConfigError


def shorten(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `dgpp_core.api.ModelSpec.shorten`: the first layers of each half, the halves as long to each other as before.

    The second half's entries follow from the first, which ends before the last source and has an n-gram layer at least.

    Raises:
        ConfigError: there is no room for both.
    """
    text, count = config["text_config"], config["text_config"]["num_hidden_layers"]
    ratios, stages, tables = text["compress_ratios"], text["num_nextn_predict_layers"], text["engram_layer_ids"]
    whole, split = len(ratios) - stages, text["candidate_source_layer_id"]
    first = max(tables[0] + 1, count * split // whole)
    if first >= count:
        expected = f"at least {first + 1}: an n-gram layer, a source behind it"
        raise ConfigError("too few layers", where="--layers", found=str(count), expected=expected)
    kept = [*range(first), *range(split, split + count - first)]

    def left(layers: Sequence[int]) -> list[int]:
        return [kept.index(layer) for layer in layers if layer in kept]

    targets = min(len(text["dspark_target_layer_ids"]), count - first)
    engrams = left(tables)
    return {**config, "text_config": {
        **text,
        "compress_ratios": [ratios[layer] for layer in kept] + ratios[whole:],
        "kv_source_layer_ids": left(text["kv_source_layer_ids"]),
        "index_source_layer_ids": left(text["index_source_layer_ids"]),
        "candidate_source_layer_id": first,
        "engram_layer_ids": engrams,
        "engram_num_embeddings": text["engram_num_embeddings"][: len(engrams)],
        "dspark_target_layer_ids": list(range(count - targets, count)),
    }}  # fmt: skip
