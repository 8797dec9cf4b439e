"""Every fault on the page of known ones names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "known_faults.md"
NAMED = re.compile(r"`((?:tests|plugins)/[\w/.-]+\.py)::(test_\w+)`")


@cache
def functions_of(path: str) -> frozenset[str]:
    """The test functions of a file, those of classes too."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_every_known_fault_has_tests_that_exist() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| fault |")]
    assert len(rows) > 60
    missing = []
    for row in rows:
        fault, prevention, column = row.removeprefix("| ").removesuffix(" |").split(" | ")
        named = NAMED.findall(column)
        assert named, f"no test: {fault}"
        assert prevention
        assert ", ".join(f"`{path}::{test}`" for path, test in named) == column
        missing += [f"{path}::{test}" for path, test in named if test not in functions_of(path)]
    assert not missing
