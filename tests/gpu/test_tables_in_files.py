"""Tables in the checkpoint's files on a CUDA device: the replies of the resident table, from graphs and without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dgpp_core.api import Binding, BindingTable, CheckpointError, EngineError, Lookup
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.row_files import RowFiles
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import Reply, World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=64, prefill_budget_tokens=128)
FAMILIES = [("qwen38-flash-next", "nvfp4", 2), ("deepseek41-flash", "fp8-fp4", 4)]


def checkpoint(name: str, fmt: str, folder: Path) -> LoadedModel:
    model = load_plugins(environ={}).model(name)
    raw, dtype = in_format(model.spec, model.spec.tiny_config, fmt)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4, dtype=dtype)
    return model


def settings(where: str, depth: int, graphs: bool) -> EngineSettings:
    values = {field: getattr(SETTINGS, field) for field in SETTINGS.__struct_fields__}
    return EngineSettings(
        **values | {"ngram_table": where, "mtp": depth > 0, "mtp_depth": max(1, depth), "decode_graph": graphs}
    )


def replies(world: World) -> list[Reply]:
    source = torch.Generator().manual_seed(2)
    for number, length in enumerate((70, 5, 200, 33)):
        tokens = torch.randint(3, 500, (length,), generator=source).tolist()
        params = SamplingParams(temperature=0.8, seed=number) if number % 2 else GREEDY
        world.submit(tokens, 12, params=params)
    return list(world.run().values())


@pytest.mark.parametrize(("name", "fmt", "depth"), FAMILIES)
def test_replies_are_those_of_the_resident_table(name: str, fmt: str, depth: int, tmp_path: Path) -> None:
    model = checkpoint(name, fmt, tmp_path)
    for drafts, graphs in ((0, False), (depth, False), (depth, True)):
        resident, in_files = (
            replies(World.from_checkpoint(model, tmp_path, settings(where, drafts, graphs), device="cuda"))
            for where in ("resident", "mmap")
        )
        assert [reply.tokens for reply in in_files] == [reply.tokens for reply in resident], f"{drafts}, {graphs}"
        assert all(len(reply.tokens) == 12 for reply in resident)


def test_a_captured_look_up_reads_what_is_asked_at_replay(tmp_path: Path) -> None:
    model = load_plugins(environ={}).model("qwen38-flash-next")
    table = BindingTable(
        tuple(
            Binding(name=f"t.{i}", shape=(500, 160), target="t", role="embedding", formats=("F8_E4M3",))
            for i in range(3)
        ),
        lookups=(Lookup("t", 16),),
    )
    synthesise(model.spec, table, model.spec.tiny_config, tmp_path, seed=1)
    served, device = table.for_serving(drafting=True, in_files=True), torch.device("cuda", 0)
    entries = read_headers(tmp_path)
    files = RowFiles(served, entries, device=device, dtype=torch.bfloat16)
    on_cpu = RowFiles(served, entries, device=torch.device("cpu"), dtype=torch.bfloat16)
    held = on_cpu.tables["t"]
    rows, numbers = files.tables["t"], torch.zeros(5, 16, dtype=torch.int64, device=device)
    rows[numbers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = rows[numbers]
    for seed in range(4):
        asked = torch.randint(1500, (5, 16), generator=torch.Generator().manual_seed(seed))
        numbers.copy_(asked)
        graph.replay()
        more = rows[torch.cat([numbers, numbers])]  # a larger buffer, between replays
        torch.cuda.synchronize()
        assert torch.equal(found.view(torch.uint8).cpu(), held[asked].view(torch.uint8))
        assert torch.equal(more.view(torch.uint8).cpu(), held[torch.cat([asked, asked])].view(torch.uint8))
    files.check()
    numbers[0, 0] = 1500
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(CheckpointError, match="row of the table t"):
        files.check()


def test_rows_of_no_numbers_end_the_step_with_the_table_among_what_is_to_be_checked(tmp_path: Path) -> None:
    model = checkpoint("qwen38-flash-next", "fp8", tmp_path)
    for name, entry in read_headers(tmp_path).items():
        if "ngram_embedding.shard_" in name:
            with entry.file.open("r+b") as file:
                file.seek(entry.start)
                file.write(b"\x7f" * entry.nbytes)
    world = World.from_checkpoint(model, tmp_path, settings("mmap", 1, True), device="cuda")
    with pytest.raises(EngineError, match="no finite largest value") as refused:
        world.reply([5, 6, 7, 8], 4)
    assert "ple.table" in refused.value.hint


def test_a_checkpoint_that_becomes_short_ends_the_step_by_name(tmp_path: Path) -> None:
    model = checkpoint("qwen38-flash-next", "nvfp4", tmp_path)
    world = World.from_checkpoint(model, tmp_path, settings("mmap", 1, True), device="cuda")
    world.reply([5, 6, 7, 8], 4)
    file = next(iter(read_headers(tmp_path).values())).file
    os.truncate(file, 100)
    with pytest.raises(CheckpointError) as refused:
        world.reply([9, 8, 7, 6], 4)
    assert refused.value.hint == "restore the checkpoint and start again"
