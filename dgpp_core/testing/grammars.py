"""Random schemas, and replies written by chance through a grammar's masks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import datetime, time
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
import numpy as np

from dgpp_core.text.grammar.formats import FORMATS
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.vocabulary import Vocabulary, allowed

PATTERNS = ("^[a-z]{2,5}$", "^(foo|ba[rz])+$", "[0-9]", r"^\d{3}-\w*$", r"^[^a-c\s]{1,4}$", "x$")
_CLOSERS = (b'"}', b'"', b"}", b"]", b"null", b"0", b"1", b",", b":")


FORMATS_CHECKED = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


def _is_time(value: object) -> bool:
    return not isinstance(value, str) or time.fromisoformat(value).tzinfo is not None


FORMATS_CHECKED.checks("date-time", raises=ValueError)(_is_date_time)
FORMATS_CHECKED.checks("time", raises=ValueError)(_is_time)


def validate(schema: Any, text: bytes) -> None:
    """Judge a JSON text by another implementation, with decimals in place of floats.

    Raises:
        jsonschema.ValidationError: it does not conform.
        ValueError: it is no JSON.
    """
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    value = json.loads(text.decode(), parse_float=_exact_number, parse_int=_exact_number)
    with localcontext(prec=1000):
        jsonschema.Draft202012Validator(exact, format_checker=FORMATS_CHECKED).validate(value)


def _exact_number(text: str) -> Any:
    try:
        return int(text) if text.lstrip("-").isdigit() else Decimal(text)
    except (InvalidOperation, ValueError):  # more digits than either takes
        return float(text)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of supported keywords with at most ``depth`` levels; most of them have a value."""
    kinds = [_string, _number, _choice, _flag] + ([_object, _object, _array, _union] if depth else [])
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    match rng.randrange(4):
        case 0:
            low = rng.randrange(4)
            schema |= {"minLength": low, "maxLength": low + rng.randrange(6)}
        case 1:
            schema["pattern"] = rng.choice(PATTERNS)
        case 2:
            schema["format"] = rng.choice(sorted(FORMATS))
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    scale = rng.choice([1, 0.5, 0.01])
    low = round(rng.uniform(-1000, 1000) * scale, rng.randrange(4))
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = round(low + rng.uniform(2, 3000), rng.randrange(4))
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([2, 3, 0.5, 7, 0.25])
    return schema


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [1, "one", None, True, 1.5, [1, {"a": "b"}], {"k": [], "l": -2}, "", "ü\n", -3e-5]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, rng.randrange(1, 5))}


def _flag(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"], ["string", "null"], ["integer", "array"]])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b", "name", "x-y", "ü", 'q"uote'], rng.randrange(5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    match rng.randrange(4):
        case 0:
            schema["additionalProperties"] = random_schema(rng, depth - 1)
        case 1:
            schema["patternProperties"] = {"^z[0-9]$": random_schema(rng, depth - 1)}
            schema["additionalProperties"] = False
        case 2:
            schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth - 1)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.6:
        schema["minItems"] = rng.randrange(3)
        schema["maxItems"] = schema["minItems"] + rng.randrange(4)
    return schema


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    name = rng.choice(["anyOf", "anyOf", "oneOf", "allOf"])
    if name == "allOf":
        return {"allOf": [_object(rng, depth) for _ in range(2)]}
    if name == "oneOf":
        return {"oneOf": [{"type": kind} for kind in rng.sample(["string", "integer", "boolean", "null"], 2)]}
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}


def write(
    matcher: Matcher,
    vocabulary: Vocabulary,
    ends: Sequence[int],
    rng: random.Random,
    patience: int = 40,
    first: Sequence[bytes] = (),
) -> list[int] | None:
    """A reply, without its end, of tokens picked by chance among those allowed; None if it does not end.

    Args:
        patience: tokens after which ends and closing brackets go before chance.
        first: texts of further tokens that go before chance then.

    Raises:
        AssertionError: the matcher reports a fault.
    """
    closers = [vocabulary.pieces.index(piece) for piece in (*first, *_CLOSERS) if piece in vocabulary.pieces]
    written: list[int] = []
    for count in range(patience * 20):
        mask = matcher.masks()[0]
        assert not matcher.fault, matcher.fault
        hurry = [*ends, *closers] if count >= patience and rng.random() < 0.7 else ()
        token = next((token for token in hurry if allowed(mask, token)), None)
        if token is None:
            token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
        matcher.take([token])
        if token in ends:
            return written
        written.append(token)
    return None
