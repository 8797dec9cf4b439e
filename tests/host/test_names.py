"""The core decides nothing by which model it serves: what tells models apart is their plugins'."""

import ast
from collections.abc import Iterator
from pathlib import Path

from dgpp_core.host.loading import load_plugins

CORE = Path(__file__).parents[2] / "dgpp_core"
ALLOWED = {
    "checkpoint/gguf.py": "the one architecture whose GGUF files are read; the folder that is made names it",
}


def names_in(source: str) -> Iterator[str]:
    """Identifiers and texts of a file's code; texts of several lines are help and docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value


def test_no_models_name_appears_in_the_core() -> None:
    specs = load_plugins(environ={}).models().values()
    names = {name for spec in specs for name in (spec.name, spec.repository, *spec.architectures) if name}
    assert {"glm47", "Glm4MoeForCausalLM"} <= names
    found = {
        f"{path.relative_to(CORE)}: {text}"
        for path in CORE.rglob("*.py")
        if str(path.relative_to(CORE)) not in ALLOWED
        for text in names_in(path.read_text(encoding="utf-8"))
        if any(name in text.split("/") or name in text.split(".") or name == text for name in names)
    }
    assert not found
