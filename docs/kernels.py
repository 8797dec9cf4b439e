"""The table of docs/kernels.md: ``python docs/kernels.py`` compiles every kernel for every GPU and rewrites it.

A test compiles the same and compares. Registers depend on the compiler, so the page names its version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dgpp_core.testing.compile import Compiled, compile_all, kernel_modules

PAGE = Path(__file__).parent / "kernels.md"
_TABLE = re.compile(r"(<!-- compiled -->\n).*?(<!-- end -->)", re.DOTALL)
_CARDS = {90: "sm_90", 121: "sm_121"}


def compiler() -> str:
    """Name and version of the compiler whose registers the page shows."""
    import triton

    return f"Triton {triton.__version__}"


def table(made: Iterable[Compiled]) -> str:
    """The page's table of ``made``, by module, name and target."""
    lines = [
        f"Compiled with {compiler()}.",
        "",
        "| kernel | target | registers | shared memory, bytes | matrix instruction |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in sorted(made, key=lambda m: (m.module, m.name, m.target)):
        instructions = ", ".join(f"`{name}`" for name in one.mma) or "-"
        lines.append(f"| {one.name} | {_CARDS[one.target]} | {one.registers} | {one.shared} | {instructions} |")
    return "\n".join(lines) + "\n"


def page(text: str, made: Iterable[Compiled]) -> str:
    """``text`` with its table made new."""
    return _TABLE.sub(lambda match: match[1] + table(made) + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), compile_all(kernel_modules())))
