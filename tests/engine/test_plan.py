"""The memory plan: exact for tensors, monotone, and its advice is right to the block."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dgpp_core.api import (
    Binding,
    BindingTable,
    CheckpointError,
    ConfigError,
    Lookup,
    ModelConfig,
    PagedGroup,
    PlanError,
    PlanTerm,
    RecurrentGroup,
    Stack,
    StateGroup,
    WindowGroup,
)
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.geometry import make_geometry
from dgpp_core.engine.plan import Plan, headroom_bytes, make_plan
from dgpp_core.engine.plan_terms import ATTENTION_ROWS, GIB, MIB
from dgpp_core.engine.state import StatePools
from dgpp_core.formats.resident import DeviceKind
from dgpp_core.layers.paged import CHUNK_ROWS
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.tile_attention import tile_attention

CONFIG = ModelConfig(vocab_size=300, max_positions=4096, hidden_size=64)
TABLE = BindingTable(
    (
        Binding(name="embed", shape=(300, 64), target="embed", role="embedding"),
        Binding(name="norm", shape=(64,), target="norm", role="vector"),
        Binding(name="q", shape=(64, 64), target="qkv", cut=0),
        Binding(name="k", shape=(32, 64), target="qkv", cut=0),
        Binding(name="o", shape=(64, 100), target="o", cut=1),
    ),
    shared=(("embed", "head"),),
)
PAGED = (PagedGroup(name="k", layers=2, heads=2, width=16), PagedGroup(name="v", layers=2, heads=2, width=24))
HYBRID = (
    *PAGED,
    WindowGroup(name="w", layers=3, heads=2, width=16, window=32),
    RecurrentGroup(name="r", layers=4, shape=(3, 5, 7)),
)
ROOMY = 1 << 50


def plan(
    settings: EngineSettings | None = None,
    groups: Sequence[StateGroup] = HYBRID,
    available: int = ROOMY,
    world: int = 1,
    step_width: int = 2,
    extra: Sequence[PlanTerm] = (),
) -> Plan:
    return make_plan(
        table=TABLE,
        groups=groups,
        config=CONFIG,
        settings=settings or EngineSettings(mtp_depth=5),
        world=world,
        device_kind="cpu",
        step_width=step_width,
        extra=extra,
        available=available,
    )


def line(found: Plan, name: str) -> int:
    return next(item.bytes for item in found.lines if item.name == name)


@pytest.mark.parametrize("groups", [PAGED, HYBRID])
@pytest.mark.parametrize("step_width", [1, 3])
@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 5000])
def test_exact_lines_are_the_bytes_that_are_allocated(
    groups: Sequence[StateGroup], step_width: int, capacity: int
) -> None:
    settings = EngineSettings(kv_capacity=capacity, max_concurrency=3, prefix_cache_gib=0.002, mtp_depth=5)
    found = plan(settings, groups, step_width=step_width)
    pools = StatePools(groups, make_geometry(CONFIG, groups, settings, step_width - 1), torch.device("cpu"))
    state = sum(item.bytes for item in found.lines if item.name.startswith(("state", "prefix")))
    assert state == pools.bytes
    plain = 4 * (300 * 64 + 64)
    packed = [Linear(torch.zeros(shape)) for shape in ((96, 64), (64, 100), (300, 64))]
    sizes = [torch.ops.mkldnn._nbytes(w._product.data) for w in packed if w._product.data.is_mkldnn]
    if len(sizes) == len(packed):
        assert found.tensor_bytes - state == plain + sum(sizes)
    assert found.total > found.tensor_bytes


def test_state_by_hand() -> None:
    found = plan(EngineSettings(kv_capacity=100, max_concurrency=3, prefix_cache_gib=3 * 14200 / 2**30, mtp_depth=5))
    assert line(found, "state: k") == 2 * (2 + 1) * 2 * 64 * 16 * 4
    assert line(found, "state: w") == 3 * (3 + 1) * 2 * (32 + 2) * 16 * 4
    assert line(found, "state: r") == 4 * (3 + 1) * 2 * 105 * 4
    snapshot = 3 * 2 * 34 * 16 * 4 + 4 * 105 * 4
    assert snapshot <= 14736
    assert line(found, "prefix snapshots") == (3 * 14200 // snapshot) * snapshot


def test_snapshots_stop_at_their_limit_and_need_state_to_keep() -> None:
    small = (RecurrentGroup(name="r", layers=1, shape=(4,)),)
    assert line(plan(groups=small), "prefix snapshots") == 4096 * 16
    assert not any(item.name == "prefix snapshots" for item in plan(groups=PAGED).lines)
    assert not any(item.name == "prefix snapshots" for item in plan(EngineSettings(prefix_cache_gib=0)).lines)


def test_ranks_hold_their_part() -> None:
    one, two = plan(), plan(world=2)
    assert line(one, "weights: linear") == 4 * (128 * 64 + 64 * 112)
    assert line(two, "weights: linear") == 4 * (64 * 64 + 64 * 64)
    assert line(one, "weights: embedding") == line(two, "weights: embedding") == 300 * 64 * 4
    with pytest.raises(CheckpointError, match="cannot be divided among 3 ranks"):
        plan(world=3)


QUANTISED = BindingTable(
    (
        Binding(name="head", shape=(300, 1024), target="head"),
        *(
            Binding(name=f"e.{i}.{half}.weight", shape=(32, 1024), target="gate_up", cut=0, storage="nvfp4")
            for i in range(40)
            for half in ("gate", "up")
        ),
    ),
    stacks=(Stack("gate_up", 40, 5),),
)


def quantised_plan(world: int = 1, **settings: object) -> Plan:
    return make_plan(
        table=QUANTISED, groups=PAGED, config=CONFIG, settings=EngineSettings(**settings), world=world,
        device_kind="cuda", step_width=1, extra=(), available=ROOMY,
    )  # fmt: skip


def test_a_gpu_keeps_stored_forms() -> None:
    found, half = quantised_plan(), quantised_plan(world=2)
    assert line(found, "weights: linear, nvfp4") == 80 * (32 * 512 + 32 * 64 + 4)
    assert line(half, "weights: linear, nvfp4") == 80 * (16 * 512 + 16 * 64 + 4)
    assert line(found, "weights: linear") == 300 * 1024 * 2
    assert "2.6 M parameters" in next(item.note for item in found.lines if item.name == "weights: linear, nvfp4")
    packed = line(quantised_plan(bf16_weights="bf12"), "weights: linear")
    assert 0.75 < packed / (300 * 1024 * 2) < 0.76
    assert line(quantised_plan(bf16_weights="bf12+bf16"), "weights: linear") == packed + 300 * 1024 * 2


def test_a_table_in_files_leaves_the_weights_for_a_buffer_of_rows() -> None:
    """Of 2,048 prompt tokens' rows and numbers; on a CPU of none. The note says what there is to cache."""
    rows = Binding(name="t", shape=(1 << 20, 160), target="t", role="embedding", formats=("F8_E4M3",), cut=0)
    table = BindingTable((*QUANTISED.tensors, rows), stacks=QUANTISED.stacks, lookups=(Lookup("t", 16),))

    def planned(where: str, kind: DeviceKind, world: int = 1) -> Plan:
        settings = EngineSettings(kv_capacity=4096, prefill_budget_tokens=2048, ngram_table=where)  # type: ignore[arg-type]
        return make_plan(
            table=table, groups=PAGED, config=CONFIG, settings=settings, world=world, device_kind=kind, step_width=1,
            extra=(), available=ROOMY,
        )  # fmt: skip

    assert line(planned("resident", "cuda"), "weights: embedding") == 160 << 20
    found = planned("mmap", "cuda")
    assert "weights: embedding" not in {item.name for item in found.lines}
    assert line(found, "table in files: t") == 2048 * 16 * (160 + 8)
    assert line(planned("mmap", "cpu"), "table in files: t") == 0
    notes = [next(i.note for i in planned("mmap", "cuda", n).lines if i.name.endswith(": t")) for n in (1, 2)]
    assert [note.split(" GiB")[0] for note in notes] == ["0.2", "0.1"]
    with pytest.raises(ConfigError, match="no table"):
        quantised_plan(ngram_table="mmap")
    for where, advised in (("resident", True), ("mmap", False)):
        plan = planned(where, "cuda")
        with pytest.raises(PlanError) as refused:
            msgspec.structs.replace(plan, available=plan.total // 2).require()
        assert ("set ngram_table mmap, " in refused.value.hint) == advised


def test_matrices_that_are_rounded_are_planned_in_8_bits_and_loaded_some_rows_at_a_time() -> None:
    shape = (100_000, 1024)
    head = Binding(name="head.weight", shape=shape, target="head", cut=0)
    table = BindingTable((head,), roundable=("head",))

    def planned(form: str) -> Plan:
        settings = EngineSettings(kv_capacity=64, max_concurrency=1, dense_weights=form)  # type: ignore[arg-type]
        return make_plan(
            table=table, groups=PAGED, config=CONFIG, settings=settings, world=2, device_kind="cuda", step_width=1,
            extra=(), available=ROOMY,
        )  # fmt: skip

    found = planned("fp8")
    assert line(planned("checkpoint"), "weights: linear") == 100_000 * 1024
    # A half has 50,000 rows; 16 of them are the largest blocks that also end where the other half begins.
    assert line(found, "weights: linear, fp8_block") == 50_000 * 1024 + 4 * 8 * (50_000 // 16)
    loading = 256 * MIB + 100_000 * 1024 + 32 * 2048 * 1024
    ours = ("state", "logits", "sampler", "activations", "decode graphs")
    later = sum(item.bytes for item in found.lines if item.name.startswith(ours))
    assert line(found, "loading") == loading - later


def test_a_row_meets_a_few_matrices_of_a_stack() -> None:
    """The activations are bounded by five experts' 64 rows each, not by the 2,560 of the layer's."""
    activations = next(item for item in quantised_plan().lines if item.name == "activations")
    rows = int(activations.note.split()[0])
    assert activations.bytes == rows * (4 * (64 + 320) + 2 * (3 * 64 + 64))


@pytest.mark.parametrize(("step_width", "drafted"), [(1, 0), (3, 8 * 64)])
def test_gated_values_are_half_of_a_stacks_rows_and_a_drafter_is_given_what_it_reads(
    step_width: int, drafted: int
) -> None:
    """A row becomes 3 x 96 values going out; of 3 x 64 gates and products 3 x 32 are left."""
    up = Binding(name="up.weight", shape=(8 * 64, 96), target="up", cut=None)
    down = Binding(name="down.weight", shape=(8 * 96, 32), target="down", cut=None)
    table = BindingTable((up, down), stacks=(Stack("up", 8, 3), Stack("down", 8, 3)))
    found = make_plan(
        table=table, groups=PAGED, config=CONFIG, settings=EngineSettings(), world=1, device_kind="cuda",
        step_width=step_width, extra=(), available=ROOMY,
    )  # fmt: skip
    activations = next(item for item in found.lines if item.name == "activations")
    rows = int(activations.note.split()[0])
    assert activations.bytes == rows * (4 * (64 + 3 * 96) + 2 * (3 * 64 + 3 * 32) + drafted)


def test_weights_that_fit_nowhere_are_not_helped_by_settings() -> None:
    found = make_plan(
        table=QUANTISED, groups=PAGED, config=CONFIG, settings=EngineSettings(), world=1, device_kind="cuda",
        step_width=1, extra=(), available=1 << 20,
    )  # fmt: skip
    with pytest.raises(PlanError) as refused:
        found.require()
    assert "no setting makes room for the weights" in refused.value.hint
    assert "more ranks" in refused.value.hint


def test_the_familys_own_terms_are_added() -> None:
    found = plan(extra=[PlanTerm("rotary table", 12345, "4096 positions")])
    assert line(found, "rotary table") == 12345
    assert found.total == plan().total + 12345


def test_on_a_gpu_captured_shapes_are_counted_and_attention_holds_no_scores() -> None:
    def names(step_width: int = 2, **changes: object) -> dict[str, int]:
        settings = EngineSettings(max_concurrency=6, mtp_depth=5, **changes)  # type: ignore[arg-type]
        found = make_plan(
            table=TABLE, groups=PAGED, config=CONFIG, settings=settings, world=1, device_kind="cuda",
            step_width=step_width, extra=(), available=ROOMY,
        )  # fmt: skip
        return {item.name: item.bytes for item in found.lines}

    captured = names()
    # Steps of 1, 2, 3, 4 and 6 requests with two rows each keep logits and hidden states; each is five graphs.
    assert captured["decode graphs"] == 16 * 2 * 4 * (300 + 2 * 64) + 6 * 2 * 300 * 8 + 5 * 5 * MIB
    # At depths 1, 2, 4 and 5 (a step width of 6), each shape is captured once a depth.
    adaptive = names(6, mtp_schedule=True)["decode graphs"]
    assert adaptive == 16 * (2 + 3 + 5 + 6) * 4 * (300 + 2 * 64) + 6 * 6 * 300 * 8 + 4 * 5 * 5 * MIB
    assert "attention" not in captured
    assert "decode graphs" not in names(decode_graph=False)


def test_headroom() -> None:
    assert headroom_bytes("cpu", 8 * GIB) == 256 * MIB
    assert headroom_bytes("cpu", 100 * GIB) == 2 * GIB
    assert headroom_bytes("cuda", 100 * GIB) == 4 * GIB


def test_a_refusal_names_everything_that_helps() -> None:
    found = plan(EngineSettings(kv_capacity=1_000_000, mtp_depth=5), available=900 * MIB)
    assert not found.fits
    with pytest.raises(PlanError) as caught:
        found.require()
    text = str(caught.value)
    for word in (
        "need",
        "headroom 256.0 MiB",
        "available 900.0 MiB",
        "0.62 KiB",
        "max_concurrency",
        "prefix_cache_gib",
    ):
        assert word in text
    assert f"the largest kv_capacity that fits is {found.largest_kv_capacity} (now 1000000)" in text
    largest = sorted(found.lines, key=lambda item: -item.bytes)[:3]
    assert all(item.name in caught.value.where for item in largest)
    assert caught.value.exit_code == 1
    assert "does not fit" in found.table()


def test_a_refusal_where_no_pool_fits_says_so() -> None:
    found = plan(available=300 * MIB)
    assert found.largest_kv_capacity == 0
    with pytest.raises(PlanError, match="not one block of kv_capacity fits"):
        found.require()


def test_a_plan_that_fits_requires_nothing_and_prints_every_line() -> None:
    found = plan()
    found.require()
    assert found.largest_kv_capacity is None
    table = found.table()
    assert all(item.name in table for item in found.lines)
    assert table.endswith("the plan fits")
    as_json = json.loads(json.dumps(found.to_json()))
    assert (as_json["total"], as_json["fits"]) == (sum(item["bytes"] for item in as_json["lines"]), True)


SETTINGS = st.builds(
    EngineSettings,
    max_concurrency=st.integers(1, 64),
    kv_capacity=st.integers(1, 200_000),
    block_tokens=st.sampled_from([1, 16, 64, 100]),
    prefix_cache_gib=st.sampled_from([0.0, 0.01, 1.5]),
    prefill_budget_tokens=st.sampled_from([-1, 0, 16, 2048]),
    mtp_depth=st.just(5),
)


@given(SETTINGS, st.sampled_from([PAGED, HYBRID]), st.integers(1, 4), st.integers(0, 2**32))
def test_the_suggested_capacity_fits_and_a_block_more_does_not(
    settings: EngineSettings, groups: Sequence[StateGroup], step_width: int, available: int
) -> None:
    found = plan(settings, groups, available, step_width=step_width)
    assume(found.largest_kv_capacity is not None)
    largest = found.largest_kv_capacity
    assert largest is not None
    assert largest % settings.block_tokens == 0
    assert largest < settings.kv_capacity
    if largest:
        smaller = msgspec.structs.replace(settings, kv_capacity=largest)
        assert plan(smaller, groups, available, step_width=step_width).fits
    next_up = msgspec.structs.replace(settings, kv_capacity=largest + settings.block_tokens)
    assert not plan(next_up, groups, available, step_width=step_width).fits


@given(SETTINGS, st.sampled_from(["kv_capacity", "max_concurrency", "prefix_cache_gib"]), st.integers(1, 1000))
def test_more_of_anything_never_takes_less(settings: EngineSettings, key: str, more: int) -> None:
    grown = msgspec.structs.replace(settings, **{key: getattr(settings, key) + more})
    assert plan(grown).total >= plan(settings).total


@given(SETTINGS, st.integers(1, 4))
def test_deeper_drafts_never_take_less_state(settings: EngineSettings, depth: int) -> None:
    fixed = msgspec.structs.replace(settings, prefix_cache_gib=0.0)
    assert plan(fixed, step_width=depth + 1).tensor_bytes >= plan(fixed, step_width=depth).tensor_bytes


def test_attention_rows_are_those_of_the_paged_layer() -> None:
    assert ATTENTION_ROWS == CHUNK_ROWS


@pytest.mark.parametrize(("budget", "slots"), [(256, 2), (16, 32)])
def test_the_attention_term_bounds_what_attention_holds(budget: int, slots: int) -> None:
    """Peak of the tensors alive inside `tile_attention`, counted by torch's own allocation profiler."""
    groups = (PagedGroup(name="k", layers=1, heads=2, width=16), PagedGroup(name="v", layers=1, heads=2, width=16))
    settings = EngineSettings(kv_capacity=2048, max_concurrency=slots, prefill_budget_tokens=budget)
    bound = line(plan(settings, groups, step_width=1), "attention")
    peak = 0
    for batch, rows in ((1, min(budget, CHUNK_ROWS)), (slots, 1)):
        keys = torch.randn(batch, 32, 2, 64, 16)
        visible = torch.ones(batch, 32, rows, 64, dtype=torch.bool)
        q = torch.randn(batch, rows, 4, 16)
        with torch.profiler.profile(profile_memory=True) as profile:
            tile_attention(q, keys, keys, visible, 0.25)
        alive = most = 0
        for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                alive += event.nbytes()
                most = max(most, alive)
        peak = max(peak, most + 2 * keys.numel() * 4)
    assert 0.4 * bound <= peak <= bound, (peak / MIB, bound / MIB)
