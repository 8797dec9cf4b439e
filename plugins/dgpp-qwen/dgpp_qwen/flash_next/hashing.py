"""Constants of the n-gram hash: multipliers, and one run of table rows of prime length for each head. Torch-free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the config is checked by its constants
    from dgpp_qwen.flash_next.config import FlashNextConfig

_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class HashConstants(msgspec.Struct, frozen=True):
    """Of the one layer that has n-grams.

    Attributes:
        multipliers: odd, one for each token of an n-gram, so small that a product with a token id fits 63 bits.
        sizes: rows of each head, ascending primes.
        offsets: first row of each head.
        rows: of the table, a multiple of `FlashNextConfig.ngram_divisor`.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


def constants(c: FlashNextConfig) -> HashConstants:
    """The constants that a checkpoint of this config must hold."""
    half = max(1, ((1 << 63) - 1) // c.vocab_size // 2)
    multipliers = tuple(2 * (_mixed(c.seed + _GOLDEN * (i + 1)) % half) + 1 for i in range(c.ngram_size))
    sizes = _primes_from(c.ngram_vocab_size_base, c.ngram_heads)
    offsets = tuple(sum(sizes[:head]) for head in range(c.ngram_heads))
    return HashConstants(multipliers, sizes, offsets, -(-sum(sizes) // c.ngram_divisor) * c.ngram_divisor)


def _mixed(value: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + _GOLDEN) & _WORD
    value = (value ^ (value >> 30)) * _FIRST & _WORD
    value = (value ^ (value >> 27)) * _SECOND & _WORD
    return value ^ (value >> 31)


def _primes_from(start: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    while len(found) < count:
        if start > 1 and all(start % divisor for divisor in range(2, math.isqrt(start) + 1)):
            found.append(start)
        start += 1
    return tuple(found)
