"""The tables of the documentation that come from the code: ``python docs/tables.py`` rewrites them in place.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test compares the pages with this script.
"""

from __future__ import annotations

import inspect as python_inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, UNSET, Struct, inspect

from dgpp_core.api import Hooks
from dgpp_core.cli.options import CAPACITY, SERVICE
from dgpp_core.config.settings import IDLE_KEYS, EngineSettings, HttpSettings
from dgpp_core.formats.resident import bf16_matrix_bytes, stored_bytes
from dgpp_core.formats.storage import STORAGES, parts
from dgpp_core.host.contract import REQUIRED_HOOKS
from dgpp_core.server.requests import ChatRequest, CompletionRequest

DOCS = Path(__file__).parent
_MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def engine_settings() -> str:
    """Keys of a deployment's ``engine`` that this version acts on."""
    texts = {key: _plain(text) for key, text in (CAPACITY | SERVICE).items()} | _documented(EngineSettings)
    active = [f for f in _fields(EngineSettings) if f.name not in IDLE_KEYS]
    rows = [(f"`{f.name}`", _default(f), allowed(f.type), texts[f.name]) for f in active]
    return _table(("key", "default", "allowed", "meaning"), rows)


def idle_settings() -> str:
    """Keys that are read and checked only."""
    return ", ".join(f"`{key}`" for key in IDLE_KEYS) + "\n"


def http_settings() -> str:
    """Keys of a deployment's ``http``."""
    rows = [(f"`{f.name}`", _default(f), allowed(f.type)) for f in _fields(HttpSettings)]
    return _table(("key", "default", "allowed"), rows)


def request_fields() -> str:
    """Fields of the two generation routes."""
    chat = {f.name: f for f in _fields(ChatRequest)}
    plain = {f.name: f for f in _fields(CompletionRequest)}
    rows = []
    for name in sorted(chat | plain):
        forms = [allowed(form[name].type) if name in form else "-" for form in (chat, plain)]
        rows.append((f"`{name}`", forms[0], "the same" if forms[0] == forms[1] else forms[1]))
    return _table(("field", "chat", "completions"), rows)


def hooks() -> str:
    """Hooks of the plugin contract."""
    rows = []
    for name, hook in vars(Hooks).items():
        if name.startswith("dgpp_"):
            arguments = ", ".join(list(python_inspect.signature(hook).parameters)[1:])
            required = "yes" if name in REQUIRED_HOOKS else "no"
            rows.append((f"`{name}({arguments})`", required, _plain((hook.__doc__ or "").strip().splitlines()[0])))
    return _table(("hook", "required", "gives"), rows)


def storages() -> str:
    """Storages of a matrix, their tensors in a checkpoint, and the bits of a weight on a GPU."""
    side, rows = 8192, []
    for name in STORAGES:
        held = parts(name, "matrix.weight", (side, side))
        tensors = ", ".join(f"`{part.suffix}`" for part in held if part.use == "required")
        size = bf16_matrix_bytes((side, side)) if name == "dense" else stored_bytes(name, (side, side))
        rows.append((f"`{name}`", tensors, f"{8 * size / side**2:.2f}"))
    return _table(("storage", "tensors after the stem", "bits a weight"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "engine-settings": engine_settings,
    "idle-settings": idle_settings,
    "http-settings": http_settings,
    "request-fields": request_fields,
    "hooks": hooks,
    "storages": storages,
}


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def allowed(kind: inspect.Type) -> str:
    """The values a field takes, in words."""
    match kind:
        case inspect.Metadata(type=inner):
            return allowed(inner)
        case inspect.UnionType(types=types):
            return " or ".join(allowed(t) for t in types if not isinstance(t, inspect.NoneType | inspect.CustomType))
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case inspect.BoolType():
            return "true, false"
        case inspect.IntType() | inspect.FloatType():
            return _number(kind)
        case inspect.StrType(min_length=least, max_length=most):
            return "string" + (f" of at most {most}" if most else " that is not empty" if least else "")
        case inspect.ListType(max_length=most):
            return "array" + (f" of at most {most}" if most else "")
        case inspect.DictType(max_length=most):
            return "object" + (f" of at most {most}" if most else "")
        case _:
            return "object"


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    name = "integer" if isinstance(kind, inspect.IntType) else "number"
    lower, upper = (kind.ge, kind.gt), (kind.le, kind.lt)
    parts = [f"{sign} {_short(value)}" for sign, value in zip((">=", ">"), lower, strict=True) if value is not None]
    parts += [f"{sign} {_short(value)}" for sign, value in zip(("<=", "<"), upper, strict=True) if value is not None]
    return f"{name} {', '.join(parts)}".strip()


def _short(value: float) -> str:
    for power in (20, 30, 31, 40, 63):
        for offset, text in ((0, ""), (-1, " - 1")):
            if abs(value) == 2**power + offset:
                return f"{'-' if value < 0 else ''}2^{power}{text}"
    return f"{value:g}"


def _default(field: inspect.Field) -> str:
    if field.default in (UNSET, NODEFAULT):
        return "none"
    if isinstance(field.default, Struct):
        return "its members' own"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"`{field.default}`" if field.default != "" else "empty"


def _documented(kind: type[Struct]) -> dict[str, str]:
    """Texts by key of a docstring's ``key, key: text`` entries."""
    found: dict[str, str] = {}
    for names, text in re.findall(r"^ {8}([a-z0-9_]+(?:, [a-z0-9_]+)*): (.+)$", kind.__doc__ or "", re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), _plain(text))
    return found


def _plain(text: str) -> str:
    """A docstring's sentence as a table cell."""
    return (text[:1].upper() + text[1:]).replace("``", "`").removesuffix(".")


def _fields(kind: type[Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [tuple(head)] + [tuple(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Rewrite every page."""
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
