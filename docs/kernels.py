"""The table of docs/kernels.md: ``python docs/kernels.py`` compiles every kernel for every GPU and rewrites it.

Registers depend on the compiler, so the page names its version, and a digest of the sources that were compiled. A test
compares the digest, and compiles the largest binaries anew.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import dgpp_core.bus.device
import dgpp_core.ops.kernels
from dgpp_core.testing.compile import Compiled, cases_of, compile_all, kernel_modules, problems

PAGE = Path(__file__).parent / "kernels.md"
_TABLE = re.compile(r"(<!-- compiled -->\n).*?(<!-- end -->)", re.DOTALL)
_ROW = re.compile(r"^\| (.+) \| sm_(\d+) \| (\d+) \| (\d+) \| .+ \|$", re.MULTILINE)


def compiler() -> str:
    """Name and version of the compiler whose registers the page shows."""
    import triton

    return f"Triton {triton.__version__}"


def sources() -> str:
    """A digest of the modules with kernels."""
    found = hashlib.sha256()
    for folder in (*dgpp_core.bus.device.__path__, *dgpp_core.ops.kernels.__path__):
        for file in sorted(Path(folder).glob("*.py")):
            found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def row(one: Compiled) -> str:
    """A binary's line of the table."""
    instructions = ", ".join(f"`{name}`" for name in one.mma) or "-"
    return f"| {one.name} | sm_{one.target} | {one.registers} | {one.shared} | {instructions} |"


def sizes(text: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Registers, and bytes of shared memory, of what a page shows, by name and target."""
    return {
        (name, int(target)): (int(registers), int(shared)) for name, target, registers, shared in _ROW.findall(text)
    }


def table(made: Iterable[Compiled]) -> str:
    """The page's table of ``made``, by module, name and target."""
    lines = [
        f"Compiled with {compiler()}.",
        f"Digest of the sources: `{sources()}`.",
        "",
        "| kernel | target | registers | shared memory, bytes | matrix instruction |",
        "| --- | --- | --- | --- | --- |",
        *(row(one) for one in sorted(made, key=lambda m: (m.module, m.name, m.target))),
    ]
    return "\n".join(lines) + "\n"


def page(text: str, made: Iterable[Compiled]) -> str:
    """``text`` with its table made new."""
    return _TABLE.sub(lambda match: match[1] + table(made) + match[2], text)


def faults(made: Iterable[Compiled]) -> list[str]:
    """What is wrong with any of ``made``, a line each."""
    cases = {(module, case.name): case for module in kernel_modules() for case in cases_of(module)}
    return [
        f"{one.name} for sm_{one.target}: {fault}"
        for one in made
        for fault in problems(one, cases[one.module, one.name])
    ]


if __name__ == "__main__":
    every = compile_all(kernel_modules())
    if found := faults(every):
        sys.exit("\n".join(found))
    PAGE.write_text(page(PAGE.read_text(), every))
