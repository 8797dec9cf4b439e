"""Random checkpoints of any registered model, written from its binding table.

A tensor's values depend on the seed and its name alone, so they are the same however the checkpoint is divided.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dgpp_core.api.bindings import Binding, BindingTable
from dgpp_core.api.errors import CheckpointError
from dgpp_core.api.spec import ModelSpec
from dgpp_core.checkpoint.check import parts_of
from dgpp_core.checkpoint.config_json import CONFIG
from dgpp_core.checkpoint.headers import INDEX
from dgpp_core.checkpoint.progress import Progress, silent
from dgpp_core.checkpoint.synth_text import END, START, text_files, token_id
from dgpp_core.checkpoint.synth_values import dense_pieces, stored_tensors
from dgpp_core.checkpoint.write import ShardWriter, Slot, divide

SHARD_BYTES = 1 << 30
MOST_WORKERS = 16


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
    """Write a whole checkpoint folder: weights, tokenizer, chat template and, last of all, its config.

    A folder that was not finished has no config.json and is no checkpoint: its weights may be zeros in part.

    Args:
        config: the config.json that ``bindings`` was made from; its end and start tokens are replaced with those of
            the written tokenizer.
        folder: made if it is not there.
        dtype: safetensors dtype of the dense tensors whose binding accepts it; the others take their first format.
        shard_bytes: most bytes of tensors a file; several files get an index.

    Raises:
        ConfigError: the vocabulary is too small for a byte-level tokenizer.
        CheckpointError: the disk has no room, or cannot be written.
    """
    vocab_size = spec.read_config(config).vocab_size
    ids = {"bos_token_id": token_id(START), "eos_token_id": token_id(END)}
    files = text_files(vocab_size) | {
        "generation_config.json": _json(ids),
        CONFIG: _json({"architectures": [spec.architectures[0]], **config, **ids}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_weights(bindings, folder, seed, dtype, shard_bytes, progress)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("cannot write the checkpoint", where=str(folder), found=reason) from error


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _write_weights(
    table: BindingTable, folder: Path, seed: int, dtype: str, shard_bytes: int, progress: Progress
) -> None:
    groups = {binding.name: slots(binding, dtype) for binding in table.tensors}
    sizes = {name: sum(slot.nbytes for slot in group) for name, group in groups.items()}
    total, done = sum(sizes.values()), 0
    _require_room(folder, total)
    shards = divide(groups.values(), shard_bytes)
    with (
        ShardWriter(folder, shards) as writer,
        ThreadPoolExecutor(min(MOST_WORKERS, len(os.sched_getaffinity(0)))) as pool,
    ):
        jobs = [pool.submit(_write_binding, writer, binding, seed, dtype) for binding in table.tensors]
        try:
            for job in as_completed(jobs):
                done += sizes[job.result()]
                progress("writing random weights", done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": writer.files}
        (folder / INDEX).write_text(_json(index), encoding="utf-8")


def _write_binding(writer: ShardWriter, binding: Binding, seed: int, dtype: str) -> str:
    if binding.storage == "dense":
        writer.write(binding.name, dense_pieces(binding, seed, _format(binding, dtype)))
    else:
        for name, tensor in stored_tensors(binding, seed).items():
            writer.write(name, [tensor])
    return binding.name


def slots(binding: Binding, dtype: str) -> list[Slot]:
    """The tensors that are written for a binding."""
    if binding.storage == "dense":
        return [Slot(binding.name, _format(binding, dtype), binding.shape)]
    return [Slot(part.name, part.dtypes[0], part.shape) for part in parts_of(binding) if part.use != "ignored"]


def _format(binding: Binding, dtype: str) -> str:
    return dtype if dtype in binding.formats else binding.formats[0]


def _require_room(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise CheckpointError(
            "the disk has no room for the checkpoint",
            where=str(folder),
            found=f"{free / 2**30:.3g} GiB free",
            expected=f"{needed / 2**30:.3g} GiB",
            hint="a smaller model (--tiny, or fewer --layers N), a narrower --format, or a folder on another disk",
        )
