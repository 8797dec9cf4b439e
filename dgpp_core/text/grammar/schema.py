"""Whether a JSON schema can be enforced, and the form of it that is compiled.

Everything that is kept is enforced in full; what the library would ignore, approximate or read differently is refused
here, by the path of the keyword. Values inside ``enum``, ``const``, ``default`` and ``examples`` are no schemas and are
not looked into.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from dgpp_core.text.grammar import keywords
from dgpp_core.text.grammar.formats import FORMATS, pattern_of
from dgpp_core.text.grammar.patterns import PatternError, translate
from dgpp_core.text.grammar.productive import check_productive
from dgpp_core.text.grammar.references import Location, check_references

MAX_INTEGER = 2**63


class SchemaError(ValueError):
    """A schema that cannot be enforced.

    Attributes:
        path: of the keyword, from the schema: ``properties.name.uniqueItems``; empty for the schema itself.
        why: what is wrong with it.
    """

    def __init__(self, location: Location, why: str) -> None:
        self.path, self.why = ".".join(map(str, location)), why
        super().__init__(f"{self.path or 'the schema'}: {why}")


def check_schema(schema: Any) -> Any:
    """The schema to compile in place of ``schema``: annotations gone, patterns and formats in the library's syntax.

    Raises:
        SchemaError: a keyword is unknown, malformed or cannot be enforced, a reference leads nowhere, or no
            finite value conforms.
    """
    if not isinstance(schema, dict | bool):
        raise SchemaError((), f"expected an object, found {_shown(schema)}")
    walk = _Walk()
    found = walk.schema(schema, ())
    check_references(walk.references, walk.places, SchemaError)
    check_productive(walk.places, SchemaError)
    return found


class _Walk:
    """One pass over a schema.

    Attributes:
        places: every schema by its location.
        references: what each ``$ref`` says, by its location.
    """

    def __init__(self) -> None:
        self.places: dict[Location, Any] = {}
        self.references: dict[Location, str] = {}

    def schema(self, node: Any, at: Location) -> Any:
        if not isinstance(node, dict | bool):
            raise SchemaError(at, f"expected a schema, found {_shown(node)}")
        self.places[at] = node
        if len(self.places) > keywords.MAX_SCHEMAS:
            raise SchemaError((), f"it has more than {keywords.MAX_SCHEMAS} schemas")
        if isinstance(node, bool):
            return node
        found: dict[str, Any] = {}
        for name, value in node.items():
            place = (*at, name)
            if name in keywords.ANNOTATIONS:
                if name == "$id" and at:
                    self._refuse(place, "is only supported at the root")
            elif name not in keywords.ENFORCED:
                self._refuse(place, "is not supported")
            elif name == "format":
                self._format(value, found, place)
            else:
                found[name] = self._keyword(name, value, node, place)
        return found

    def _keyword(self, name: str, value: Any, node: dict[str, Any], at: Location) -> Any:
        if name in keywords.ONE:
            return self.schema(value, at)
        if name in keywords.SEVERAL:
            return [self.schema(part, (*at, index)) for index, part in enumerate(self._list(value, at))]
        if name in keywords.NAMED:
            return self._named(name, value, at)
        if name in keywords.COUNTS:
            return self._count(name, value, node, at)
        if name in keywords.BOUNDS:
            return self._bound(name, value, at)
        if name == "pattern":
            return self._pattern(value, at)
        if name == "$ref":
            self.references[at] = self._string(value, at)
        elif name == "type":
            self._type(value, at)
        elif name == "required":
            self._required(value, at)
        else:
            for part in [value] if name == "const" else self._list(value, at):
                self._literal(part, at)
        return value

    def _named(self, name: str, value: Any, at: Location) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(at, f"expected an object, found {_shown(value)}")
        if name == "patternProperties":
            return {self._pattern(key, (*at, key)): self.schema(part, (*at, key)) for key, part in value.items()}
        if name == "properties":
            for key in value:
                self._property(key, (*at, key))
        return {key: self.schema(part, (*at, key)) for key, part in value.items()}

    def _format(self, value: Any, found: dict[str, Any], at: Location) -> None:
        """A format is a pattern of its own, beside the one that the schema may have."""
        pattern = pattern_of(self._string(value, at))
        if pattern is None:
            self._refuse(at, f"{_shown(value)} is not supported; supported: {', '.join(FORMATS)}")
        found["allOf"] = [*found.get("allOf", []), {"pattern": pattern}]

    def _pattern(self, value: Any, at: Location) -> str:
        try:
            return translate(self._string(value, at))
        except PatternError as error:
            self._refuse(at, f"{_shown(value)} cannot be enforced: {error}")

    def _count(self, name: str, value: Any, node: Mapping[str, Any], at: Location) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _is_integer(value) or not 0 <= value <= keywords.MAX_COUNT:
            self._refuse(at, f"expected an integer from 0 to {keywords.MAX_COUNT}, found {_shown(value)}")
        if name == "minProperties" and value > 1:
            required = node.get("required")
            if not isinstance(required, list) or len(required) < value:
                # A key that is not declared may be written twice, which the library counts as two.
                self._refuse(at, "is only supported up to 1, or up to the number of required properties")
            value = 1
        return cast(int, value)

    def _bound(self, name: str, value: Any, at: Location) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._refuse(at, f"expected a number, found {_shown(value)}")
        if abs(value) > keywords.MAX_BOUND:
            self._refuse(at, f"{_shown(value)} is beyond {keywords.MAX_BOUND}, where bounds are not exact")
        if name == "multipleOf" and not value >= 1e-9:
            self._refuse(at, f"expected a number from 1e-9, found {_shown(value)}")
        return value

    def _type(self, value: Any, at: Location) -> None:
        names = [value] if isinstance(value, str) else self._list(value, at)
        for name in names:
            if name not in keywords.TYPES:
                self._refuse(at, f"expected one of {', '.join(keywords.TYPES)}, found {_shown(name)}")

    def _required(self, value: Any, at: Location) -> None:
        if not isinstance(value, list):
            self._refuse(at, f"expected an array, found {_shown(value)}")
        for index, name in enumerate(value):
            self._property(self._string(name, (*at, index)), (*at, index))

    def _property(self, name: str, at: Location) -> None:
        if any(ord(char) < 0x20 for char in name):
            self._refuse(at, "a name with control characters has several spellings and cannot be told from others")

    def _literal(self, value: Any, at: Location) -> None:
        """A value of ``enum`` or ``const``, which the library spells in one way."""
        if _is_integer(value) and abs(value) >= MAX_INTEGER:
            self._refuse(at, f"{_shown(value)} is too large to be exact")
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                self._literal(part, at)

    def _list(self, value: Any, at: Location) -> list[Any]:
        if not isinstance(value, list) or not value:
            self._refuse(at, f"expected an array that is not empty, found {_shown(value)}")
        return value

    def _string(self, value: Any, at: Location) -> str:
        if not isinstance(value, str):
            self._refuse(at, f"expected a string, found {_shown(value)}")
        return value

    def _refuse(self, at: Location, why: str) -> NoReturn:
        raise SchemaError(at, why)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
