"""DeepSeek-V4.1-Flash against its equations: every kind of layer, every way to feed it, rows and weights as stored."""

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from dgpp_deepseek.deepseek41 import rows
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.testing.world import World

LENGTH = 60
TOKENS = torch.randint(3, 500, (LENGTH,), generator=torch.Generator().manual_seed(8)).tolist()
WAYS = {"prefill": [LENGTH], "mixed": [2, 29, 16, 1, 1, 1, 10], "decode": [24, *[1] * 36]}


def world(model: LoadedModel, folder: Path, **settings: Any) -> World:
    values = {"max_concurrency": 2, "kv_capacity": 512, "block_tokens": 16, "mtp": True, "mtp_depth": 5}
    return World.from_checkpoint(model, folder, EngineSettings(**(values | settings)))


def steps(tokens: list[int], counts: list[int]) -> list[StepBatch]:
    """The text in so many rows a step; single rows are decode steps."""
    made, start = [], 0
    for count in counts:
        at = torch.arange(start, start + count)
        made.append(
            StepBatch(
                tokens=torch.tensor(tokens)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
                lengths=torch.tensor([start]), block_tables=torch.arange(1, 12)[None], candidates=torch.tensor([0]),
                keep_rows=count == 1, max_length=start + count,
            )
        )  # fmt: skip
        start += count
    return made


@torch.inference_mode()
def logits_of(served: World, batches: list[StepBatch]) -> Tensor:
    model, pools = served.engine.model, served.engine.state.pools
    return model.logits(torch.cat([model.forward(batch, pools) for batch in batches]))


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def equations(reference: ModuleType, folder: Path, **how: Any) -> Any:
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return reference.Plain(weights, json.loads((folder / "config.json").read_text()), **how)


def test_logits_in_prefill_and_the_same_bits_otherwise(
    plain_rows: LoadedModel, checkpoint: Path, reference: ModuleType
) -> None:
    plain = equations(reference, checkpoint)
    wanted = plain.logits(plain.hidden(TOKENS)[0])
    found = {way: logits_of(world(plain_rows, checkpoint), steps(TOKENS, counts)) for way, counts in WAYS.items()}
    assert relative(found["prefill"], wanted) <= 1e-5
    assert all(torch.equal(other, found["prefill"]) for other in found.values())


def test_each_kind_of_layer_and_what_it_chose(plain_rows: LoadedModel, checkpoint: Path, reference: ModuleType) -> None:
    """Streams after every layer, and the entries that every row attended to."""
    served, streams, chosen = world(plain_rows, checkpoint), list[Tensor](), list[list[list[int]]]()
    model: Any = served.engine.model

    def watched(layer: Any, streams_: Tensor, pre: Tensor, attend: Any, decode: bool) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = layer(streams_, pre, attend, decode)
        streams.append(out[0])
        step = attend.keywords["step"]
        # Groups of rows, each [1, tiles, n, span]: the entries of each row, by number.
        rows_of = [mask[0].transpose(0, 1).flatten(1) for mask in step.chosen]
        chosen.append([row.nonzero().flatten().tolist() for mask in rows_of for row in mask])
        return out

    model.layers = [functools.partial(watched, layer) for layer in model.layers]
    logits_of(served, steps(TOKENS, [LENGTH]))
    kept = equations(reference, checkpoint).hidden(TOKENS)[1]
    assert [relative(*pair) <= 1e-5 for pair in zip(streams, kept.streams, strict=True)] == [True] * 8
    for layer, wanted in kept.chosen.items():
        assert chosen[layer] == wanted, layer
    assert max(map(len, kept.chosen[4])) == 8, "no row had to choose"
    assert kept.chosen[6] != kept.chosen[4]


@pytest.mark.parametrize("form", ["window", "entry", "key"])
def test_a_kept_row_is_rounded_as_it_was_trained(reference: ModuleType, form: str) -> None:
    own = {"window": rows.WINDOW, "entry": rows.ENTRY, "key": rows.KEY}[form]
    source = torch.Generator().manual_seed(6)
    x = torch.randn(200, 64, generator=source) * torch.exp2(torch.randint(-20, 12, (200, 1), generator=source))
    x[0] = 0
    x[1, ::3] = 0
    packed = own.pack(x, torch.uint8)
    assert packed.shape[1] == {"window": 66, "entry": 36, "key": 34}[form]
    wanted = getattr(reference, f"rounded_{form}")(x)
    assert torch.equal(own.unpack(packed, 64), wanted)
    assert torch.equal(own.unpack(torch.zeros_like(packed), 64), torch.zeros(200, 64))


def test_rows_as_trained_are_near_and_their_places_right(
    served: LoadedModel, checkpoint: Path, reference: ModuleType
) -> None:
    """A value that lies between two that can be kept may go either way, and moves what comes after it by a step."""
    plain = equations(reference, checkpoint, kept="native", dtype=torch.float32)
    hidden, kept = plain.hidden(TOKENS)
    wanted, own = plain.logits(hidden), world(served, checkpoint)
    found = {way: logits_of(world(served, checkpoint), steps(TOKENS, counts)) for way, counts in WAYS.items()}
    assert (found["prefill"] - wanted).norm() / wanted.norm() < 2e-2
    assert all(torch.equal(other, found["prefill"]) for other in found.values())
    logits_of(own, steps(TOKENS, [LENGTH]))
    entries = own.engine.state.pools["entries_2"][0, 1:5].reshape(32, 36)[: LENGTH // 2]
    same = rows.ENTRY.unpack(entries, 64) == kept.entries[1]
    assert same.float().mean() > 0.999


def decoded(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """The values of a stored matrix or table, element by element of its definition."""
    codes, scales = tensors[f"{name}.weight"], tensors[f"{name}.scale"].view(torch.uint8).double() - 127
    if codes.dtype == torch.float8_e4m3fn:
        height = 1 if name.endswith("engram.embed") else 32
        row, column = torch.arange(codes.shape[0]) // height, torch.arange(codes.shape[1]) // 32
        return (codes.double() * torch.exp2(scales)[row][:, column]).float()
    packed = codes.view(torch.uint8).long()
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    values = levels[torch.stack((packed & 15, packed >> 4), -1).flatten(1)]
    return (values * torch.exp2(scales).repeat_interleave(32, 1)).float()


def test_the_release_and_its_twin_in_dense_matrices_give_the_same_bits(
    served: LoadedModel, released: Path, tmp_path: Path, reference: ModuleType
) -> None:
    tensors: dict[str, Tensor] = {}
    for file in released.glob("*.safetensors"):
        tensors |= load_file(file)
    scaled = [name.removesuffix(".scale") for name in tensors if name.endswith(".scale")]
    assert {tensors[f"{name}.weight"].dtype for name in scaled} == {torch.float8_e4m3fn, torch.int8} or (
        {tensors[f"{name}.weight"].dtype for name in scaled} == {torch.float8_e4m3fn, torch.uint8}
    )
    dense = {name: value for name, value in tensors.items() if name.removesuffix(".weight") not in scaled}
    dense = {name: value for name, value in dense.items() if not name.endswith(".scale")}
    dense |= {f"{name}.weight": decoded(name, tensors) for name in scaled}
    save_file({name: value.contiguous() for name, value in dense.items()}, tmp_path / "model.safetensors")
    config = json.loads((released / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    found = [logits_of(world(served, folder), steps(TOKENS, [LENGTH])) for folder in (released, tmp_path)]
    assert torch.equal(*found)
    plain = equations(reference, tmp_path, kept="native", dtype=torch.float32)
    wanted = plain.logits(plain.hidden(TOKENS)[0])
    assert (found[0] - wanted).norm() / wanted.norm() < 2e-2


@pytest.mark.parametrize("counts", [[60], [20, 39, 1], [43, 3, 14]])
def test_a_bounded_prefill(plain_rows: LoadedModel, checkpoint: Path, reference: ModuleType, counts: list[int]) -> None:
    """The last window of a prompt alone through all layers, in chunks that end above its floor and below it."""
    plain = equations(reference, checkpoint)
    hidden, _ = plain.hidden(TOKENS, bounded=True)
    served, floor = world(plain_rows, checkpoint), LENGTH - 16
    batches = [msgspec.structs.replace(batch, floors=(floor,), keep_rows=False) for batch in steps(TOKENS, counts)]
    found = logits_of(served, batches)
    assert relative(found[floor:], plain.logits(hidden)) <= 1e-5
    exact = plain.logits(plain.hidden(TOKENS)[0])[floor:]
    assert relative(found[floor:], exact) > 1e-3, "it is an approximation, and this text shows it"
    short = world(plain_rows, checkpoint)
    whole = [msgspec.structs.replace(batch, floors=(0,), keep_rows=False) for batch in steps(TOKENS[:16], [16])]
    assert torch.equal(logits_of(short, whole), logits_of(world(plain_rows, checkpoint), steps(TOKENS[:16], [16])))


def test_prompts_of_both_kinds_in_one_prefill(plain_rows: LoadedModel, checkpoint: Path) -> None:
    """One ends in this chunk, one has not come to its floor, one is short: the bits of each alone."""
    ends = ((40, 24), (30, 34), (9, 0))
    tables = torch.arange(1, 31).view(3, 10)

    def rows(*which: int) -> StepBatch:
        at = torch.cat([torch.arange(ends[number][0]) for number in which])
        return StepBatch(
            tokens=torch.tensor(TOKENS)[at], positions=at, counts=tuple(ends[number][0] for number in which),
            slots=torch.tensor(which), lengths=torch.zeros(len(which), dtype=torch.int64),
            block_tables=tables[list(which)], candidates=torch.zeros(len(which), dtype=torch.int64), keep_rows=False,
            max_length=40, floors=tuple(ends[number][1] for number in which),
        )  # fmt: skip

    together = logits_of(world(plain_rows, checkpoint, max_concurrency=3), [rows(0, 1, 2)])
    alone = [logits_of(world(plain_rows, checkpoint, max_concurrency=3), [rows(number)]) for number in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_replies_after_a_bounded_and_an_exact_prefill(
    plain_rows: LoadedModel, checkpoint: Path, reference: ModuleType
) -> None:
    """What ``engine.prefill`` says, cold and from the cache; what a prompt shares with another ends before its tail."""
    plain = equations(reference, checkpoint)
    for prefill in ("bounded", "exact"):
        hidden, _ = plain.hidden(TOKENS, bounded=prefill == "bounded")
        wanted = int(plain.logits(hidden)[-1].argmax())
        served = world(plain_rows, checkpoint, prefill=prefill, prefix_cache_gib=0.02, prefix_min_tokens=16)
        first, again = (served.reply(TOKENS, 6) for _ in range(2))
        assert first.tokens[0] == wanted
        assert first.tokens == again.tokens
        assert again.cached == (32 if prefill == "bounded" else 48)
        longer = [*TOKENS, *first.tokens, 9, 8, 7]
        cold = world(plain_rows, checkpoint, prefill=prefill, prefix_cache_gib=0.0).reply(longer, 6)
        warm = served.reply(longer, 6)
        assert warm.cached > 0
        assert warm.tokens == cold.tokens


def test_a_reply_that_was_preempted_goes_on_as_if_it_had_not(served: LoadedModel, checkpoint: Path) -> None:
    """Its rows come back as a prefill's; the floor is that of the prompt without them."""
    prompts = [TOKENS[:40], TOKENS[20:55]]
    alone = [world(served, checkpoint, mtp=False, mtp_depth=1).reply(prompt, 24).tokens for prompt in prompts]
    tight = world(served, checkpoint, mtp=False, mtp_depth=1, kv_capacity=112, admission="grow", admission_window=2)
    requests = [tight.submit(prompt, 24) for prompt in prompts]
    replies = tight.run()
    assert tight.scheduler.stats().requests_preempted
    assert [replies[request].tokens for request in requests] == alone
