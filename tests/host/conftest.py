"""Real plugin packages on disk: a module, and the metadata that an installer would have written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest

GOOD = """
from dgpp_core.api import BindingTable, Binding, ModelConfig, ModelSpec, PagedGroup, hookimpl

DGPP_API = 1


def read_config(raw):
    return ModelConfig(vocab_size=raw["vocab_size"], max_positions=64, hidden_size=8)


def spec(name):
    config = {"vocab_size": 16}
    return ModelSpec(
        name=name, title="A test", architectures=(name.title() + "ForCausalLM",), repository="test/" + name,
        read_config=read_config, full_config=config, tiny_config=config,
    )


@hookimpl
def dgpp_models():
    return (spec("MODEL"),)


@hookimpl
def dgpp_bindings(spec, config):
    return BindingTable((Binding(name="embed", shape=(config.vocab_size, 8), target="embed", role="embedding"),))


@hookimpl
def dgpp_groups(config):
    return [PagedGroup(name="k", layers=1, heads=1, width=8)]


class Built:
    depth = 1

    def forward(self, batch, state): ...
    def logits(self, hidden): ...
    def observe(self, batch, hidden, next_tokens, state): ...
    def propose(self, batch, hidden, tokens, depth, state): ...


@hookimpl
def dgpp_build(shard):
    return Built()
"""


class Shelf:
    """A folder of plugin packages, found the way installed ones are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.modules = folder, list[str]()

    def add(self, name: str, source: str = "", *, model: str = "", value: str = "", dist: str = "") -> Path:
        """Write the package of the plugin ``name``; returns its module's file."""
        module = f"shelf_{(dist or name).replace('-', '_')}"
        file = self.folder / f"{module}.py"
        file.write_text(source or GOOD.replace("MODEL", model or name))
        info = self.folder / f"{module}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist or 'dist-' + name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[dgpp.plugins]\n{name} = {value or module}\n")
        self.modules.append(module)
        return file

    def entry_points(self) -> list[EntryPoint]:
        found = distributions(path=[str(self.folder)])
        return [point for dist in found for point in dist.entry_points.select(group="dgpp.plugins")]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Shelf(tmp_path)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


@pytest.fixture
def edited() -> Callable[[str, str], str]:
    """The good plugin with one piece of its source replaced; the piece must be there."""

    def edit(old: str, new: str) -> str:
        assert GOOD.count(old) == 1, old
        return GOOD.replace(old, new)

    return edit
