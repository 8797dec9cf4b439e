"""What a rank says about a collective before it takes part, and how ranks that disagree are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import EngineError

OPERATIONS = ("all_reduce", "all_gather", "barrier")
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip
MAX_AXES = 8


class Call(msgspec.Struct, frozen=True):
    """One collective as one rank issues it.

    Attributes:
        number: how many collectives the rank issued before.
        operation: one of `OPERATIONS`.
        dtype: of the rank's part, as torch prints it.
        shape: of the rank's part.
        dim: the axis of an all_gather, counted from the front; 0 otherwise.
    """

    number: int
    operation: str
    dtype: str
    shape: tuple[int, ...]
    dim: int = 0

    @classmethod
    def of(cls, number: int, operation: str, part: Tensor, dim: int = 0) -> Call:
        """The call that sends ``part``.

        Raises:
            EngineError: the part has a dtype or a number of axes that no transport carries, or no axis ``dim``.
        """
        axes = part.dim()
        if part.dtype not in DTYPES or axes > MAX_AXES or (operation == "all_gather" and not -axes <= dim < axes):
            raise EngineError(
                f"an {operation} cannot send this tensor",
                found=f"{part.dtype} {list(part.shape)}, axis {dim}",
                expected=f"at most {MAX_AXES} axes, the axis among them, and one of {', '.join(map(str, DTYPES))}",
            )
        return cls(number, operation, str(part.dtype), tuple(part.shape), dim % axes if axes else 0)

    def __str__(self) -> str:
        axis = f" along axis {self.dim}" if self.operation == "all_gather" else ""
        return f"collective {self.number}, {self.operation} of {self.dtype} {list(self.shape)}{axis}"

    def encode(self) -> list[int]:
        """The call as a fixed number of integers."""
        dtype = [str(dtype) for dtype in DTYPES].index(self.dtype)
        shape = [*self.shape, *([0] * (MAX_AXES - len(self.shape)))]
        return [self.number, OPERATIONS.index(self.operation), dtype, self.dim, len(self.shape), *shape]

    @classmethod
    def decode(cls, words: Sequence[int]) -> Call:
        """What `encode` gave."""
        number, operation, dtype, dim, axes, *shape = words
        return cls(number, OPERATIONS[operation], str(DTYPES[dtype]), tuple(shape[:axes]), dim)


def disagreement(calls: Mapping[int, Call]) -> EngineError | None:
    """The error to raise on every rank where not all issue the same call; names each rank with its own."""
    if len(set(calls.values())) <= 1:
        return None
    return EngineError(
        "the ranks issued different collectives",
        where=", ".join(f"rank {rank}" for rank in sorted(calls)),
        found="; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items())),
        expected="the same operation, shape, dtype and number on every rank",
        hint="every rank must run the same program on the same inputs",
    )


def another(fault: EngineError) -> EngineError:
    """The same error as an exception of its own: a traceback belongs to the one place that raised it."""
    parts = fault.parts()
    return EngineError(parts.pop("what"), **parts)
