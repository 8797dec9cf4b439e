"""Dense products at GLM-4.7's shapes on this GPU: ``python benchmarks/kernels_dense.py [--only WORD] [--json FILE]``.

A figure is the median of replays of a CUDA graph of launches in a row, over copies of the weight that no cache holds: a
launch's own start and end are inside. The floor of a decode product is its weight's bytes over the card's measured read
bandwidth; that of a prefill product its operations over the tensor cores' measured bfloat16 speed.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import triton
from msgspec import Struct, structs
from torch import Tensor

from dgpp_core.ops.kernels.dense import CudaGateUp, CudaLinear
from dgpp_core.testing.compile import compile_all
from dgpp_core.testing.graph_time import timed

READ = 4.38e12
"""Bytes a second that an H200 reads (measured)."""
MULTIPLY = 790e12
"""bfloat16 operations a second of its tensor cores (measured)."""
ROTATED = 600_000_000
"""Bytes of weights that launches rotate over: ten times the cache."""
DEVICE = torch.device("cuda")
MODULES = [
    f"dgpp_core.ops.kernels.{name}" for name in ("dense_bf16", "dense_bf12", "dense_fp8", "dense_nvfp4", "plain")
]


class Case(Struct, frozen=True):
    """One product of the model."""

    name: str
    form: str
    rows: int
    columns: int
    gated: bool = False
    prefill: bool = True


CASES = (
    Case("qkv", "bf16", 14336, 5120),
    Case("o", "bf16", 5120, 12288),
    Case("head", "bf16", 151552, 5120, prefill=False),
    Case("qkv", "bf12", 14336, 5120),
    Case("o", "bf12", 5120, 12288),
    Case("head", "bf12", 151552, 5120, prefill=False),
    Case("qkv", "fp8", 14336, 5120),
    Case("o", "fp8", 5120, 12288),
    Case("gate+up", "nvfp4", 24576, 5120, gated=True),
    Case("down", "nvfp4", 5120, 12288),
)


class Result(Struct, frozen=True):
    """Time of one launch. ``floor`` and ``share`` as in the module's text."""

    name: str
    form: str
    phase: str
    m: int
    microseconds: float
    floor: float
    share: float


def weight(case: Case) -> dict[str, Tensor]:
    """Prepared tensors of a random weight; codes are drawn, not rounded, where that is faster."""
    rows, columns = case.rows, case.columns
    if case.form in ("bf16", "bf12"):
        parts = [torch.randn(rows // 16, columns, device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(16)]
        return CudaLinear(torch.cat(parts), DEVICE, bf16_form=case.form).prepared()  # type: ignore[arg-type]
    words = {"fp8": 2 * 32 * 4, "nvfp4": 32 * 4}[case.form]
    codes = torch.randint(-(2**31), 2**31 - 1, (rows // 16, columns // 64, words), device=DEVICE, dtype=torch.int32)
    if case.form == "fp8":
        tensor = (codes & 0x77777777).view(rows // 16, columns // 64, 2, 32, 4)
        return {"fp8.words": tensor, "fp8.scales": torch.rand(rows // 16, columns // 128, device=DEVICE)}
    scales = torch.full((rows // 16, columns // 128, 32, 4), 80, device=DEVICE, dtype=torch.uint8)
    return {
        "nvfp4.codes": codes.view(rows // 16, columns // 64, 32, 4),
        "nvfp4.scales": scales.view(torch.int32).squeeze(-1),
        "nvfp4.multipliers": torch.ones(rows // 16, device=DEVICE),
    }


def copies(case: Case) -> tuple[list[CudaLinear], int]:
    """The weight often enough to leave the cache, and its bytes."""
    first = weight(case)
    size = sum(tensor.nbytes for tensor in first.values())
    kind = CudaGateUp if case.gated else CudaLinear
    others = [{name: tensor.clone() for name, tensor in first.items()} for _ in range(ROTATED // size)]
    return [kind.from_prepared(tensors) for tensors in (first, *others)], size


def decode(case: Case, products: list[CudaLinear], size: int, m: int) -> Result:
    """One decode product of ``m`` rows, as its consumer takes it: partial sums, or gated channels."""
    x = torch.randn(m, case.columns, device=DEVICE).bfloat16()

    def launch(i: int) -> Tensor:
        product = products[i % len(products)]
        return product(x) if case.gated else product.partials(x)

    spent, floor = timed(launch, 4 if size > ROTATED else 24), size / READ * 1e6
    return Result(case.name, case.form, "decode", m, spent, floor, floor / spent)


def prefill(case: Case, products: list[CudaLinear], m: int) -> Result:
    """One prefill product of ``m`` rows."""
    x = torch.randn(m, case.columns, device=DEVICE).bfloat16()
    spent = timed(lambda i: products[i % len(products)](x, decode=False), 4, 5)
    floor = 2 * m * case.rows * case.columns / MULTIPLY * 1e6
    return Result(case.name, case.form, "prefill", m, spent, floor, floor / spent)


def report(results: list[Result]) -> None:
    """A table of every result."""
    print(f"{'product':10} {'form':6} {'phase':8} {'rows':>5} {'µs':>9} {'floor':>8} {'share':>6}")
    for r in results:
        print(f"{r.name:10} {r.form:6} {r.phase:8} {r.m:5} {r.microseconds:9.1f} {r.floor:8.1f} {r.share:6.0%}")


@click.command()
@click.option("--only", default="", help="Cases whose name or form contains this.")
@click.option("--rows", default="1,4,8,16", help="Row counts of decode products.")
@click.option("--prefill-rows", default="2048", help="Row counts of prefill products; empty for none.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(only: str, rows: str, prefill_rows: str, path: Path | None) -> None:
    """Measure dense products on this GPU."""
    compile_all(MODULES, [10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]])
    results = []
    for case in CASES:
        if only not in f"{case.name} {case.form}":
            continue
        products, size = copies(case)
        results += [decode(case, products, size, int(m)) for m in rows.split(",")]
        if case.prefill:
            results += [prefill(case, products, int(m)) for m in prefill_rows.split(",") if m]
        del products
        torch.cuda.empty_cache()
    report(results)
    if path:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        card = torch.cuda.get_device_name()
        path.write_text(
            json.dumps({"card": card, "versions": versions, "results": [structs.asdict(r) for r in results]})
        )


if __name__ == "__main__":
    main()
