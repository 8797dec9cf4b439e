"""Stored matrices below each other, without a second copy of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from dgpp_core.formats.matrix import Matrix


def stack(parts: Iterator[Matrix], count: int) -> Matrix:
    """What ``Matrix.stack`` gives for ``count`` parts, made as they come.

    Alike parts, whose stack is their tensors below each other, are copied into the stacked tensors one by one, so that
    a layer's experts take their own room and one expert's more. Parts that need other scales to be one matrix are
    collected and stacked as their format does it.

    Raises:
        CheckpointError: as the format's ``stack``.
    """
    first = next(parts)
    if count == 1:
        return first
    second = next(parts)
    both = _by_format([first, second])
    if not (_alike(first, second) and _lies_below(both, first, second)):
        return _by_format([first, second, *parts])
    # The numbers that say how to read the stack are its own: parts less high than their scale block make lower blocks.
    whole = _replace(both, {name: t.new_empty(count * t.shape[0], *t.shape[1:]) for name, t in _fields(first)})
    into = dict(_fields(whole))
    for place, part in enumerate(itertools.chain((first, second), parts)):
        if not _alike(first, part):
            head = _replace(whole, {name: into[name][: place * t.shape[0]] for name, t in _fields(first)})
            return _by_format([head, part, *parts])
        for name, tensor in _fields(part):
            into[name].narrow(0, place * tensor.shape[0], tensor.shape[0]).copy_(tensor)
    return whole


def _lies_below(both: Matrix, first: Matrix, second: Matrix) -> bool:
    """Whether the tensors of the stack of two are theirs, one below the other."""
    stacked, below = dict(_fields(both)), {n: (t, dict(_fields(second))[n]) for n, t in _fields(first)}
    return stacked.keys() == below.keys() and all(
        torch.equal(_bytes(stacked[name]), torch.cat([_bytes(a), _bytes(b)])) for name, (a, b) in below.items()
    )


def _alike(a: Matrix, b: Matrix) -> bool:
    """Same format, shapes, dtypes and the numbers that say how to read the tensors."""
    return type(a) is type(b) and _form(a) == _form(b)


def _form(matrix: Matrix) -> list[tuple[str, object]]:
    fields = msgspec.structs.asdict(cast("msgspec.Struct", matrix)).items()
    return [(name, (value.shape, value.dtype) if isinstance(value, Tensor) else value) for name, value in fields]


def _fields(matrix: Matrix) -> list[tuple[str, Tensor]]:
    return list(matrix.tensors().items())


def _replace(matrix: Matrix, fields: dict[str, Tensor]) -> Matrix:
    return cast("Matrix", msgspec.structs.replace(cast("msgspec.Struct", matrix), **fields))


def _by_format(parts: list[Matrix]) -> Matrix:
    return cast("Matrix", cast("Any", type(parts[0])).stack(parts))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
