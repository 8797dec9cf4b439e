"""Damaged tokenizer files: each is refused by file and field, or loads as exactly the tokenizer it was."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.api.errors import TokenizerError
from dgpp_core.text.tokenizer import PROBE, Tokenizer

TEXTS = [
    PROBE,
    "The quick brown fox <think>안녕하세요</think> 世界<|im_end|> <tool_call>",
    "  a\n\n\tb 0123 👩‍👩‍👧‍👦 龘",
]
WRONG: list[Any] = [None, "no such token", -1, 1.5, 2**40, True, [], {}, [None], {"x": 1}]
# Files that are whole and only say something else: no reader can know that they once said more.
VALID = {
    "('added_tokens', 5) deleted", "('post_processor',) = None", "('post_processor', 'single', 0) deleted",
    "('model', 'merges', 0) deleted", "('model', 'merges', 152) deleted", "('bos_token',) deleted",
    "('bos_token',) = None", "('eos_token',) deleted", "('eos_token',) = None", "('pad_token',) = 'no such token'",
    "('chat_template',) deleted", "('chat_template',) = None",
}  # fmt: skip


def behaviour(tokenizer: Tokenizer) -> tuple[Any, ...]:
    """All that a front end sees of a tokenizer."""
    ids = range(tokenizer.vocab_size)
    return (
        [tokenizer.token_bytes(i) for i in ids],
        [tokenizer.is_special(i) for i in ids],
        [(tokenizer.encode(text), tokenizer.encode_prompt(text)) for text in TEXTS],
        dict(tokenizer.special_tokens),
        tokenizer.chat_template,
    )


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, str]:
    """The two files, with the chat template inside the config so that it can be damaged there."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "{{ messages[0].content }}"
    return {
        "tokenizer.json": (folder / "tokenizer.json").read_text(encoding="utf-8"),
        "tokenizer_config.json": json.dumps(config, indent=1),
    }


def paths_in(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value; of long lists and objects the first, a middle and the last entry."""
    if path:
        yield path
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    chosen = keys if len(keys) <= 16 else [keys[0], keys[len(keys) // 2], keys[-1]]
    for key in chosen:
        yield from paths_in(value[key], (*path, key))


def changed(parsed: Any, path: tuple[str | int, ...], value: Any = ..., *, delete: bool = False) -> str:
    result = copy.deepcopy(parsed)
    place = result
    for key in path[:-1]:
        place = place[key]
    if delete:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(result)


def kind(value: Any) -> str:
    return "number" if isinstance(value, float) else type(value).__name__


def of_another_type(parsed: Any) -> Iterator[tuple[str, str]]:
    """(what was done, the file) for each place and each value whose type is not the one that stood there."""
    for path in paths_in(parsed):
        place = parsed
        for key in path:
            place = place[key]
        yield f"{path} deleted", changed(parsed, path, delete=True)
        for value in WRONG:
            if kind(value) != kind(place) or (isinstance(value, int) and not isinstance(value, bool)):
                yield f"{path} = {value!r}", changed(parsed, path, value)


class Tally:
    """Loads damaged files and sorts them into refused and unchanged; anything else fails the test."""

    def __init__(self, folder: Path, files: dict[str, str], name: str) -> None:
        self.folder, self.name = folder, name
        for other, text in files.items():
            (folder / other).write_text(text, encoding="utf-8")
        self.before = behaviour(Tokenizer.load(folder))
        self.refused: list[str] = []
        self.unchanged: list[str] = []
        self.places: list[str] = []

    def assert_named(self) -> None:
        """Every refusal named the damaged file, or the other one where the two contradict each other."""
        assert all(place.startswith(str(self.folder)) for place in self.places)
        named = sum(place.startswith(str(self.folder / self.name)) for place in self.places)
        assert named > 0.95 * len(self.places)

    def load(self, label: str, raw: bytes) -> None:
        (self.folder / self.name).write_bytes(raw)
        try:
            loaded = Tokenizer.load(self.folder)
        except TokenizerError as error:
            self.refused.append(label)
            self.places.append(error.where)
            return
        if label not in VALID:
            assert behaviour(loaded) == self.before, f"loaded as another tokenizer: {label}"
        self.unchanged.append(label)


def test_tokenizer_json_with_a_wrong_value_anywhere(tmp_path: Path, intact: dict[str, str]) -> None:
    tally = Tally(tmp_path, intact, "tokenizer.json")
    for label, text in of_another_type(json.loads(intact["tokenizer.json"])):
        tally.load(label, text.encode())
    tally.assert_named()
    assert len(tally.refused) > 1000
    assert len(tally.unchanged) < 40


def test_tokenizer_config_with_a_wrong_value_anywhere(tmp_path: Path, intact: dict[str, str]) -> None:
    tally = Tally(tmp_path, intact, "tokenizer_config.json")
    for label, text in of_another_type(json.loads(intact["tokenizer_config.json"])):
        tally.load(label, text.encode())
    tally.assert_named()
    assert len(tally.refused) > 80
    assert len(tally.unchanged) < 40


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_cut_short(tmp_path: Path, intact: dict[str, str], name: str) -> None:
    tally = Tally(tmp_path, intact, name)
    raw = intact[name].encode()
    for length in [0, 1, *sorted(random.Random(3).sample(range(2, len(raw) - 1), 60)), len(raw) - 1]:
        tally.load(f"{length} bytes", raw[:length])
    tally.assert_named()
    assert not tally.unchanged


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "raw", [b"null", b"[]", b"7", b'"x"', b"\xff\xfe{\x00}\x00", b"{}x", b"{" * 10_000, b"[" * 10_000]
)
def test_files_that_are_no_object(tmp_path: Path, intact: dict[str, str], name: str, raw: bytes) -> None:
    tally = Tally(tmp_path, intact, name)
    tally.load(repr(raw[:20]), raw)
    assert not tally.unchanged
