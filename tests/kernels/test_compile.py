"""Every kernel compiles for every GPU, within its registers and shared memory, as the page of kernels says."""

import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from dgpp_core.testing.compile import Compiled, cases_of, compile_all, kernel_modules

pytest.importorskip("triton", reason="Triton is there on Linux only")
pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs/kernels.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(script: ModuleType) -> str:
    content: str = script.PAGE.read_text(encoding="utf-8")
    return content


@pytest.fixture(scope="module")
def largest(script: ModuleType, text: str) -> Sequence[Compiled]:
    """Of each kernel and GPU the binaries with the most registers and with the most shared memory, compiled now.

    What the page shows of the others was compiled from the same sources: see the test of their digest.
    """
    sizes, kinds = script.sizes(text), defaultdict(list)
    for module in kernel_modules():
        for case in cases_of(module):
            for target in case.targets:
                registers, shared = sizes.get((case.name, target), (0, 0))
                kinds[id(case.kernel), target].append((registers, shared, case.name))
    wanted = set()
    for (_, target), found in kinds.items():
        wanted.add((max(found)[2], target))
        wanted.add((max(found, key=lambda size: (size[1], size[0], size[2]))[2], target))
    return compile_all(kernel_modules(), only=wanted)


def test_the_page_has_every_binary(script: ModuleType, text: str) -> None:
    cases = [(case.name, target) for module in kernel_modules() for case in cases_of(module) for target in case.targets]
    assert len(set(cases)) == len(cases), "two binaries share a name"
    assert script.sizes(text).keys() == set(cases), "run: python docs/kernels.py"


def test_the_page_is_of_these_sources(script: ModuleType, text: str) -> None:
    assert f"Digest of the sources: `{script.sources()}`." in text, "run: python docs/kernels.py"


def test_the_largest_binaries_compile_without_a_fault(script: ModuleType, largest: Sequence[Compiled]) -> None:
    assert {made.module for made in largest} == set(kernel_modules())
    assert {made.target for made in largest} == {90, 121}
    assert script.faults(largest) == []


def test_the_page_shows_what_they_are(script: ModuleType, text: str, largest: Sequence[Compiled]) -> None:
    if f"Compiled with {script.compiler()}." not in text:
        pytest.skip(f"the page was written with another compiler than {script.compiler()}")
    lines = text.splitlines()
    assert [line for made in largest if (line := script.row(made)) not in lines] == [], "run: python docs/kernels.py"
