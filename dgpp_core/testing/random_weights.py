"""Random weights made where they are used, without a checkpoint: for benchmarks of models too large to write first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from zlib import crc32

import torch
from msgspec import structs
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError
from dgpp_core.checkpoint.check import parts_of
from dgpp_core.checkpoint.cuts import cut_ranges, cut_shape
from dgpp_core.checkpoint.stacking import stack
from dgpp_core.checkpoint.synth_values import random_tensor, stored_tensors
from dgpp_core.formats.codec import decode
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix


class RandomWeights:
    """Implements `dgpp_core.api.Weights` for a rank.

    Dense values are normal by their binding's `Init`. Of stored matrices one is made for each shape and storage; the
    others are it with its rows moved round, so that every matrix has its own bytes and 35 GB take seconds. The same
    seed, table, device and number of ranks give the same weights; what is not cut is the same on every rank.
    """

    def __init__(
        self,
        table: BindingTable,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._device, self._dtype, self._seed = device, dtype, seed
        self._waiting: dict[str, list[Binding]] = {}
        self._numbers: dict[str, int] = {}
        for binding in table.tensors:
            part = structs.replace(binding, shape=cut_shape(binding, world))
            self._waiting.setdefault(binding.target, []).append(part)
            whole = world == 1 or binding.cut is None
            start, length = cut_ranges(binding, rank, world)[0]
            held = binding.name if whole else f"{binding.name} of rank {start // length}"
            self._numbers[binding.name] = crc32(held.encode())
        self._originals: dict[tuple[str, tuple[int, ...]], dict[str, Tensor]] = {}

    def take(self, target: str) -> Tensor:
        """See `Weights`."""
        return _joined([self._dense(binding) for binding in self._claim(target)])

    def matrix(self, target: str) -> Matrix:
        """See `Weights`."""
        bindings = self._claim(target)
        if self._storage(bindings[0]) == "dense":
            return DenseMatrix(_joined([self._dense(binding) for binding in bindings]))
        return stack(self._stored(bindings), len(bindings))

    def prepared(
        self, target: str | tuple[str, ...], form: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """See `Weights`."""
        return make()

    def finish(self) -> None:
        """Drop what matrices were made from.

        Raises:
            CheckpointError: a parameter was never taken.
        """
        self._originals.clear()
        if self._waiting:
            raise CheckpointError(
                f"the model never took the parameter {next(iter(self._waiting))}", where="model build"
            )

    def _claim(self, target: str) -> list[Binding]:
        bindings = self._waiting.pop(target, None)
        if bindings is None:
            raise CheckpointError(f"the parameter {target} is not in the binding table, or taken", where="model build")
        return bindings

    def _storage(self, binding: Binding) -> str:
        return binding.resident if binding.resident and self._device.type == "cuda" else binding.storage

    def _dense(self, binding: Binding) -> Tensor:
        if binding.stays_stored and not binding.stays_float32:
            return random_tensor(binding, self._seed, binding.formats[0]).to(self._device)
        dtype = torch.float32 if binding.stays_float32 else self._dtype
        source = torch.Generator(self._device).manual_seed(self._seed + self._numbers[binding.name])
        values = torch.empty(binding.shape, dtype=dtype, device=self._device)
        # A trained router's correction bias evens the choice of experts out; a random one would send all rows to a few.
        std = 0.0 if binding.role == "vector" and binding.stays_float32 else binding.init.std
        return values.normal_(binding.init.mean, std, generator=source)

    def _stored(self, bindings: list[Binding]) -> Iterator[Matrix]:
        for binding in bindings:
            rows, columns = binding.shape
            storage, shift = self._storage(binding), 1 + self._numbers[binding.name] % rows
            moved = {name: _roll(tensor, shift) for name, tensor in self._original(binding, storage).items()}
            yield decode(storage, moved, (rows, columns), binding.name)

    def _original(self, binding: Binding, storage: str) -> dict[str, Tensor]:
        """Checkpoint tensors of one matrix like ``binding``, by suffix."""
        key = storage, binding.shape
        if key not in self._originals:
            like = Binding(
                name=binding.name, shape=binding.shape, target=binding.target, init=binding.init, storage=storage
            )
            named = stored_tensors(like, self._seed)
            suffixes = {part.name: part.suffix for part in parts_of(like)}
            self._originals[key] = {suffixes[name]: tensor.to(self._device) for name, tensor in named.items()}
        return self._originals[key]


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts below each other; one alone is not copied, since the plan has no room for a head twice."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _roll(tensor: Tensor, shift: int) -> Tensor:
    """A copy with its rows moved round; a list of numbers that is no matrix (its shape, a scalar) as it is."""
    if tensor.dim() < 2:
        return tensor
    return tensor.view(torch.uint8).roll(shift, 0).view(tensor.dtype)
