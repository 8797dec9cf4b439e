"""Random checkpoints of any registered model, written from its binding table.

A tensor's values depend on the seed and its name alone, so they are the same however the checkpoint is divided.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgpp_core.api.bindings import Binding, BindingTable
from dgpp_core.api.spec import ModelSpec
from dgpp_core.checkpoint.headers import DTYPE_BITS, INDEX, SINGLE
from dgpp_core.checkpoint.progress import Progress, silent
from dgpp_core.checkpoint.synth_text import END, START, text_files, token_id

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 1 << 30


def synthesise(
    spec: ModelSpec,
    bindings: BindingTable,
    config: Mapping[str, Any],
    folder: Path,
    *,
    seed: int,
    dtype: str = "BF16",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> None:
    """Write a whole checkpoint folder: weights, config, tokenizer, chat template.

    Args:
        config: the config.json that ``bindings`` was made from; its end and start tokens are replaced with those of
            the written tokenizer.
        folder: made if it is not there.
        dtype: safetensors dtype of the tensors whose binding accepts it; the others take their first format.
        shard_bytes: most bytes of tensors a file; several files get an index.

    Raises:
        ConfigError: the vocabulary is too small for a byte-level tokenizer.
    """
    vocab_size = spec.read_config(config).vocab_size
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": token_id(START), "eos_token_id": token_id(END)}
    files = text_files(vocab_size) | {
        "config.json": _json({"architectures": [spec.architectures[0]], **config, **ids}),
        "generation_config.json": _json(ids),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_weights(bindings, folder, seed, dtype, shard_bytes, progress)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _write_weights(
    table: BindingTable, folder: Path, seed: int, dtype: str, shard_bytes: int, progress: Progress
) -> None:
    from safetensors.torch import save_file

    shards = _divide(table, dtype, shard_bytes)
    total = sum(_stored_bytes(binding, dtype) for binding in table.tensors)
    placed, done = {}, 0
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for binding in shard:
            tensors[binding.name] = random_tensor(binding, seed, _format(binding, dtype))
            done += _stored_bytes(binding, dtype)
            progress("writing random weights", done, total)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        placed.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        (folder / INDEX).write_text(_json({"metadata": {"total_size": total}, "weight_map": placed}), encoding="utf-8")


def _divide(table: BindingTable, dtype: str, shard_bytes: int) -> list[list[Binding]]:
    shards: list[list[Binding]] = [[]]
    filled = 0
    for binding in table.tensors:
        size = _stored_bytes(binding, dtype)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(binding)
        filled += size
    return shards


def _format(binding: Binding, dtype: str) -> str:
    return dtype if dtype in binding.formats else binding.formats[0]


def _stored_bytes(binding: Binding, dtype: str) -> int:
    return math.prod(binding.shape) * DTYPE_BITS[_format(binding, dtype)] // 8


def random_tensor(binding: Binding, seed: int, dtype: str) -> Tensor:
    """The tensor that ``binding`` gets under ``seed``: normal by its `Init`, or uniform bytes for an integer format."""
    import numpy as np
    import torch

    from dgpp_core.checkpoint.reader import TORCH_DTYPES

    key = hashlib.sha256(f"{seed}/{binding.name}".encode()).digest()
    source = np.random.Generator(np.random.Philox(int.from_bytes(key[:8], "little")))
    kind = TORCH_DTYPES[dtype]
    if not kind.is_floating_point:
        raw = source.integers(0, 256, size=math.prod(binding.shape) * kind.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(kind).view(binding.shape)
    values = source.standard_normal(binding.shape, dtype=np.float32)
    return torch.from_numpy(np.asarray(values * binding.init.std + binding.init.mean, np.float32)).to(kind)
