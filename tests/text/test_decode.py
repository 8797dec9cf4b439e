import random
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dgpp_core.text.decode import IncrementalDecoder, Utf8Decoder
from dgpp_core.text.tokenizer import Tokenizer

TEXTS = [
    "👩‍👩‍👧‍👦 🧑🏽‍💻 🇰🇷🇩🇪 ❤️‍🔥",
    "안녕하세요, 만나서 반갑습니다. 오늘 날씨가 좋네요.",
    "龘靐齉爩 𠜎𠜱𡿺 世界",
    "really \ufffd here \ufffd\ufffd and at the end \ufffd",
    "\x00\x01\x1b[0m\x7f\r\n\t\x0b",
    "e\u0301 a\u0308 \u200d\u200b\ufeff",
    " " * 40 + "\n\n\n\t\t x",
    "plain ASCII, <think> and <|im_end|> inside",
]


def random_texts(count: int) -> Iterator[str]:
    source = random.Random(5)
    ranges = [(0x20, 0x7F), (0, 0x20), (0xA0, 0x2FF), (0x1100, 0x1200), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
    ranges += [(0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0xFFF0, 0x10000)]
    for _ in range(count):
        chosen = (source.choice(ranges) for _ in range(source.randrange(1, 40)))
        yield "".join(chr(source.randrange(*bounds)) for bounds in chosen)


def decoded(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> str:
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    return "".join(decoder.push(token_id) for token_id in ids) + decoder.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_pushed_tokens_are_the_whole_decode(tokenizer: Tokenizer, backend: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert decoded(tokenizer, ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False) == text


def test_random_text_comes_back_whole(tokenizer: Tokenizer) -> None:
    for text in random_texts(400):
        assert decoded(tokenizer, tokenizer.encode(text), skip_special=False) == text


def test_any_ids_decode_as_the_library_decodes_them_at_once(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer
) -> None:
    source = random.Random(7)
    for _ in range(500):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(source.randrange(30))]
        for skip in (False, True):
            assert decoded(tokenizer, ids, skip_special=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_skipped_by_id_and_added_ones_stay(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>a<think>b<|im_end|>c")
    assert decoded(tokenizer, ids) == "a<think>bc"
    assert decoded(tokenizer, ids, skip_special=False) == "<s>a<think>b<|im_end|>c"


def test_ids_outside_the_vocabulary_are_nothing(tokenizer: Tokenizer) -> None:
    assert decoded(tokenizer, [tokenizer.vocab_size, -1, 10**6]) == ""


def test_a_cut_character_ends_in_one_replacement(tokenizer: Tokenizer) -> None:
    bytes_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    family = "ab🙂".encode()
    for end, want in ((2, "ab"), (3, "ab\ufffd"), (5, "ab\ufffd"), (6, "ab🙂")):
        assert decoded(tokenizer, [bytes_of[bytes([byte])] for byte in family[:end]]) == want


@pytest.mark.parametrize(
    "raw",
    [b"\xc0\xaf", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff\xfe", b"\x80"],
)
def test_overlong_surrogate_and_out_of_range_bytes_are_replaced(raw: bytes) -> None:
    decoder = Utf8Decoder()
    text = "".join(decoder.push(bytes([byte])) for byte in raw) + decoder.finish()
    assert set(text) == {"\ufffd"}
    assert text == raw.decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=6), max_size=12))
def test_any_bytes_in_any_pieces(pieces: list[bytes]) -> None:
    decoder = Utf8Decoder()
    text = "".join(map(decoder.push, pieces))
    assert len(decoder.pending) <= 3
    assert text + decoder.finish() == b"".join(pieces).decode("utf-8", "replace")
