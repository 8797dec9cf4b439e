"""Constants of the n-gram hashes, which follow from config.json alone: prime table sizes and odd multipliers.

Torch-free.
"""

from __future__ import annotations

import functools
import math

import msgspec
import numpy as np

from dgpp_core.api import refuse

_SEED = 10007
"""Times the layer's number, the seed of its multipliers."""


class HashConstants(msgspec.Struct, frozen=True):
    """Of one layer.

    Attributes:
        multipliers: odd, one for each token of an n-gram, the newest first; so small that no product with a class
            overflows 63 bits.
        sizes: rows that each slot hashes into, primes; the slots are n-gram sizes and, within each, heads.
        offsets: first table row of each slot.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of the table."""
        return self.offsets[-1] + self.sizes[-1]


@functools.lru_cache(maxsize=16)
def hash_constants(
    layers: tuple[int, ...], ngram_size: int, heads: int, base: int, classes: int
) -> tuple[HashConstants, ...]:
    """Constants of every layer that has a table.

    Sizes are sought from ``base`` upwards, anew for each layer and size of n-gram, passing over primes that any slot
    before has.
    """
    used: set[int] = set()
    made = []
    for layer in layers:
        sizes = [size for _ in range(ngram_size - 1) for size in _primes(base, heads, used)]
        offsets = tuple(sum(sizes[:slot]) for slot in range(len(sizes)))
        made.append(HashConstants(_multipliers(layer, ngram_size, classes), tuple(sizes), offsets))
    return tuple(made)


def require_rows(found: tuple[int, ...], constants: tuple[HashConstants, ...]) -> None:
    """Raise `ConfigError` where the tables' rows in config.json are not those that the primes come to."""
    wanted = tuple(each.rows for each in constants)
    if found != wanted:
        raise refuse("text_config.engram_num_embeddings", list(found), f"{list(wanted)}, the sums of the hash sizes")


def _multipliers(layer: int, count: int, classes: int) -> tuple[int, ...]:
    bound = max(1, (2**63 - 1) // classes // 2)
    drawn = np.random.default_rng(_SEED * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(2 * int(value) + 1 for value in drawn)


def _primes(start: int, count: int, used: set[int]) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if start not in used and _is_prime(start):
            used.add(start)
            found.append(start)
        start += 1
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
