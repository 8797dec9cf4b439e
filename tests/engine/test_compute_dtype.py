"""State rows in the dtype of the activations: planned, sized and allocated by the kind of device."""

import pytest
import torch

from dgpp_core.api import ModelConfig, PagedGroup, RecurrentGroup, StateGroup, WindowGroup, for_device
from dgpp_core.api.bindings import BindingTable
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.geometry import make_geometry, snapshot_bytes
from dgpp_core.engine.plan import make_plan
from dgpp_core.engine.state import StatePools
from dgpp_core.formats.resident import DeviceKind

GROUPS = (
    PagedGroup(name="k", layers=2, heads=3, width=8, dtype="compute"),
    WindowGroup(name="w", layers=1, heads=3, width=8, window=5, dtype="compute"),
    RecurrentGroup(name="r", layers=1, shape=(4, 4)),
)
CONFIG = ModelConfig(vocab_size=64, max_positions=128, hidden_size=16)


@pytest.mark.parametrize(("kind", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_compute_is_the_dtype_of_the_activations(kind: DeviceKind, dtype: torch.dtype) -> None:
    groups = for_device(GROUPS, kind)
    geometry = make_geometry(CONFIG, groups, EngineSettings(kv_capacity=256, prefix_cache_gib=0.001), 0)
    pools = StatePools(groups, geometry, torch.device("cpu"))
    assert {pools.pools["k"].dtype, pools.pools["w"].dtype, pools.arenas["w"].dtype} == {dtype}
    assert pools.pools["r"].dtype == torch.float32
    assert snapshot_bytes(groups, 1) == 3 * 8 * 6 * dtype.itemsize + 64


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_plan_counts_what_that_device_keeps(kind: DeviceKind) -> None:
    def lines(groups: tuple[StateGroup, ...]) -> dict[str, int]:
        plan = make_plan(
            table=BindingTable(()), groups=groups, config=CONFIG, settings=EngineSettings(kv_capacity=256), world=1,
            device_kind=kind, step_width=1, extra=(), available=1 << 40,
        )  # fmt: skip
        return {line.name: line.bytes for line in plan.lines}

    assert lines(GROUPS) == lines(for_device(GROUPS, kind))
