"""Every kernel compiles for every GPU, within its registers and shared memory, as the page of kernels says."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from dgpp_core.testing.compile import Compiled, cases_of, compile_all, kernel_modules, problems

pytest.importorskip("triton", reason="Triton is there on Linux only")
pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs/kernels.py"


@cache
def compiled(module: str) -> tuple[Compiled, ...]:
    return tuple(compile_all([module]))


@pytest.mark.parametrize("module", kernel_modules())
def test_every_binary_of(module: str) -> None:
    cases = {case.name: case for case in cases_of(module)}
    assert len(cases) == len(cases_of(module)), "two cases share a name"
    found = {f"{made.name} for sm_{made.target}": problems(made, cases[made.name]) for made in compiled(module)}
    assert {name: faults for name, faults in found.items() if faults} == {}


def page_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    script = page_script()
    text = script.PAGE.read_text()
    if f"Compiled with {script.compiler()}." not in text:
        pytest.skip(f"the page was written with another compiler than {script.compiler()}")
    assert text == script.page(text, [made for module in kernel_modules() for made in compiled(module)])
