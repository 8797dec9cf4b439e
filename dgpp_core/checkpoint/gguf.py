"""Turning a GGUF file of a Llama model into an ordinary checkpoint folder.

Matrices are dequantised; GGUF's order of the query and key rows is turned back into that of the Hugging Face layout.
Needs the extra ``gguf``.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.gguf_tokenizer import chat_template, tokenizer_config, tokenizer_json
from dgpp_core.checkpoint.headers import SINGLE
from dgpp_core.checkpoint.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = "llama"

_OUTER = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
_INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


class Metadata:
    """A GGUF file's key/value pairs.

    Args:
        where: the file, for errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = values, where

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self._values.get(key)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise CheckpointError(f"the GGUF file has no {key}", where=self.where)
        return self._values[key]


def require_gguf() -> None:
    """Raise `CheckpointError` with the command to run unless the `gguf` library is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            "reading a GGUF file needs the gguf library, which is not installed",
            hint="run: pip install 'dgpp-core[gguf]'",
        )


def convert(gguf_file: Path, out: Path, dtype: str, progress: Progress = silent) -> None:
    """Write the checkpoint folder ``out``: config, weights, tokenizer and chat template.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``; float32 keeps the file's values exactly.

    Raises:
        CheckpointError: not a readable GGUF file, another architecture or vocabulary, a tensor it does not know.
    """
    require_gguf()
    from gguf import GGUFReader
    from safetensors.torch import save_file

    try:
        reader = GGUFReader(str(gguf_file))
        meta = Metadata({key: field.contents() for key, field in reader.fields.items()}, str(gguf_file))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError("not a readable GGUF file", where=str(gguf_file), found=str(error)) from error
    if (found := meta["general.architecture"]) != ARCHITECTURE:
        raise CheckpointError(
            "the GGUF file holds another kind of model", where=str(gguf_file), found=found, expected=ARCHITECTURE
        )
    tensors = _tensors(reader, meta, dtype, progress)
    config = _config(meta, tensors, dtype)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    (out / SINGLE).chmod(0o644)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {key: config[key] for key in special if config[key] is not None}),
        ("tokenizer.json", tokenizer_json(meta)),
        ("tokenizer_config.json", tokenizer_config(meta)),
    ):
        (out / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if template := chat_template(meta):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def checkpoint_name(name: str, where: str) -> str:
    """The Hugging Face name of a GGUF tensor; raises `CheckpointError` for one that a Llama model does not have."""
    if (match := re.fullmatch(r"(\w+)\.weight", name)) and match[1] in _OUTER:
        return f"{_OUTER[match[1]]}.weight"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)) and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.weight"
    raise CheckpointError(f"the GGUF file has a tensor that a Llama model does not have: {name}", where=where)


def unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows ``[heads * d, K]`` with rotary pairs side by side, to Hugging Face's order: first halves, second halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tensors(reader: Any, meta: Metadata, dtype: str, progress: Progress) -> dict[str, Tensor]:
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(meta[f"{ARCHITECTURE}.attention.head_count"]),
        "attn_k": int(meta[f"{ARCHITECTURE}.attention.head_count_kv"]),
    }
    total, done = sum(int(tensor.n_bytes) for tensor in reader.tensors), 0
    found = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        for part, count in heads.items():
            if f".{part}." in tensor.name:
                values = unpermute(values, count)
        name = checkpoint_name(tensor.name, meta.where)
        found[name] = torch.from_numpy(np.array(values, order="C")).to(getattr(torch, dtype))
        done += int(tensor.n_bytes)
        progress("converting the checkpoint", done, total)
    return found


def _config(meta: Metadata, tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(meta[f"{ARCHITECTURE}.{key}"])

    hidden, heads = number("embedding_length"), number("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": number("context_length"),
        # Stored as float32 (9.999999747e-06): back to the decimal it came from.
        "rms_norm_eps": float(f"{float(meta[f'{ARCHITECTURE}.attention.layer_norm_rms_epsilon']):.6g}"),
        "rope_theta": float(meta[f"{ARCHITECTURE}.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype,
    }
