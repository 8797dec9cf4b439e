"""Tables that stay in the checkpoint's files: the rows of the resident table, and faults by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError, ConfigError, Lookup, ModelSpec
from dgpp_core.checkpoint.check import check_bindings
from dgpp_core.checkpoint.gather import NO_ROW, SHORT, Run, StreamGather
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.row_files import RowFiles
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.layers.rows import ResidentRows

CPU = torch.device("cpu")
HEIGHTS = (40, 40, 24)
EIGHT = ("F8_E4M3",)


def table(formats: tuple[str, ...] = EIGHT, cut: int | None = None) -> BindingTable:
    bindings = [
        Binding(name=f"t.{i}.weight", shape=(rows, 20), target="t", role="embedding", formats=formats, cut=cut)
        for i, rows in enumerate(HEIGHTS)
    ]
    other = Binding(name="n.weight", shape=(4,), target="n", role="vector")
    return BindingTable((*bindings, other), lookups=(Lookup("t", 3),))


def opened(made: BindingTable, folder: Path, rank: int = 0, world: int = 1, device: torch.device = CPU) -> RowFiles:
    served = made.for_serving(drafting=True, in_files=True)
    return RowFiles(served, read_headers(folder), device=device, dtype=torch.float32, rank=rank, world=world)


def resident(made: BindingTable, folder: Path, rank: int = 0, world: int = 1) -> Tensor:
    entries = read_headers(folder)
    return CheckpointWeights(made, entries, device=CPU, dtype=torch.float32, rank=rank, world=world).take("t")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("formats", [EIGHT, ("F8_E8M0",), ("F32", "BF16", "F16")])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (3, 4)])
def test_rows_are_those_of_the_resident_table(
    tmp_path: Path, spec: ModelSpec, formats: tuple[str, ...], rank: int, world: int
) -> None:
    made = table(formats, cut=0 if world > 1 else None)
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    held = resident(made, tmp_path, rank, world)
    files = opened(made, tmp_path, rank, world)
    numbers = torch.randint(len(held), (7, 5), generator=torch.Generator().manual_seed(2))
    for asked in (numbers, numbers[:1, :1], numbers[:0]):
        found = files.tables["t"][asked]
        assert (found.shape, found.dtype) == ((*asked.shape, 20), held.dtype)
        assert torch.equal(bits(found), bits(ResidentRows(held)[asked]))
    files.check()


def test_the_native_reader_reads_the_same(tmp_path: Path, spec: ModelSpec) -> None:
    """As on a GPU's stream, with buffers that grow and are used again."""
    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    entries, held = read_headers(tmp_path), resident(made, tmp_path)
    file = os.open(next(iter(entries.values())).file, os.O_RDONLY)
    firsts = [sum(HEIGHTS[:i]) for i in range(len(HEIGHTS))]
    runs = [Run(first, entries[f"t.{i}.weight"].start, file) for i, first in enumerate(firsts)]
    gather = StreamGather(runs, len(held), 20, CPU)
    for count in (3, 50, 1, 50):
        rows = torch.randint(len(held), (count,), generator=torch.Generator().manual_seed(count))
        assert torch.equal(gather(rows), held.view(torch.uint8)[rows])
    assert gather.fault() is None
    found = gather(torch.tensor([4, 104, -1, 103]))
    codes, nothing = held.view(torch.uint8), torch.zeros(20, dtype=torch.uint8)
    assert torch.equal(found, torch.stack([codes[4], nothing, nothing, codes[103]]))
    assert gather.fault() == (104, "the table has no such row")
    os.close(file)
    gather(torch.tensor([1]))
    assert gather.fault() == (104, "the table has no such row"), "the first fault is the one that is told"
    late = StreamGather(runs, len(held), 20, CPU)
    late(torch.tensor([1]))
    assert late.fault() == (1, os.strerror(9))
    assert SHORT != NO_ROW


def test_a_file_that_becomes_short_is_named(tmp_path: Path, spec: ModelSpec) -> None:
    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    files, entries = opened(made, tmp_path), read_headers(tmp_path)
    last = entries["t.2.weight"]
    rows = torch.tensor([0, 103])
    assert files.tables["t"][rows].shape == (2, 20)
    os.truncate(last.file, last.end - 3)
    with pytest.raises(CheckpointError, match="row of the table t") as refused:
        files.tables["t"][rows]
    assert (refused.value.where, refused.value.found) == ("row 103 of 104", "the file has become short")
    with pytest.raises(CheckpointError, match="changed while rows"):
        files.check()
    with pytest.raises(CheckpointError, match="bytes"):
        opened(made, tmp_path)


@pytest.mark.parametrize("change", ["written to", "replaced"])
def test_a_file_that_changes_between_its_header_and_its_opening_is_named(
    tmp_path: Path, spec: ModelSpec, change: str
) -> None:
    """A rank may wait for others between the two, and the offsets would be another file's."""
    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    entries = read_headers(tmp_path)
    path = entries["t.0.weight"].file
    content = path.read_bytes()
    if change == "replaced":
        path.rename(path.with_suffix(".old"))
    path.write_bytes(content[:-16] + bytes(16))
    served = made.for_serving(drafting=True, in_files=True)
    with pytest.raises(CheckpointError, match="changed since its header was read") as refused:
        RowFiles(served, entries, device=CPU, dtype=torch.float32)
    assert refused.value.where.startswith(str(path))


def test_a_file_that_is_written_to_is_named_and_one_that_is_replaced_is_still_read(
    tmp_path: Path, spec: ModelSpec
) -> None:
    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    held, files = resident(made, tmp_path), opened(made, tmp_path)
    path = next(iter(read_headers(tmp_path).values())).file
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)
    files.check()
    rows = torch.arange(len(held))
    assert torch.equal(bits(files.tables["t"][rows]), bits(held)), "an open file stays what it was"
    other.write_bytes(b"")
    again = tmp_path / "again"
    again.mkdir()
    synthesise(spec, made, spec.tiny_config, again, seed=1)
    files = opened(made, again)
    with next(iter(read_headers(again).values())).file.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match="changed while rows") as refused:
        files.check()
    assert str(again) in refused.value.where


def test_a_row_of_no_numbers_is_named_when_it_is_read(tmp_path: Path, spec: ModelSpec) -> None:
    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    entry = read_headers(tmp_path)["t.1.weight"]
    with entry.file.open("r+b") as file:
        file.seek(entry.start + 3 * 20 + 7)
        file.write(b"\x7f")  # a NaN in E4M3
    files = opened(made, tmp_path)
    rows = files.tables["t"]
    assert rows[torch.tensor([42, 44])].float().isfinite().all()
    with pytest.raises(CheckpointError, match="a row of the table t cannot be read") as refused:
        rows[torch.tensor([0, 43, 1])]
    assert (refused.value.where, refused.value.found) == ("row 43 of 104", "values that are no finite numbers")


def test_a_row_that_is_none_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    rows = opened(made, tmp_path).tables["t"]
    for number in (-1, sum(HEIGHTS)):
        with pytest.raises(CheckpointError, match="cannot be read") as refused:
            rows[torch.tensor([number])]
        assert refused.value.found == "the table has no such row"


def test_what_stays_in_files_is_checked_and_not_taken(tmp_path: Path, spec: ModelSpec) -> None:
    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    served, entries = made.for_serving(drafting=True, in_files=True), read_headers(tmp_path)
    assert [binding.name for binding in served.on_disk] == [f"t.{i}.weight" for i in range(3)]
    check_bindings(served, entries)
    weights = CheckpointWeights(served, entries, device=CPU, dtype=torch.float32, rank=0, world=1)
    with pytest.raises(CheckpointError, match="not in the binding table"):
        weights.take("t")
    weights.take("n")
    weights.finish()


def test_a_model_without_such_a_table_says_so() -> None:
    plain = BindingTable((Binding(name="n.weight", shape=(4,), target="n"),))
    with pytest.raises(ConfigError) as refused:
        plain.for_serving(drafting=False, in_files=True)
    assert refused.value.where == "engine.ngram_table"
