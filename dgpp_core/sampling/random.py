"""Counter-based random numbers: a draw is a function of (seed, position, lane) and of nothing else. Torch-free.

    u = top 53 bits of splitmix64(splitmix64(position * LANES + lane) XOR seed), over 2**53

`splitmix64` is the output function of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014),
applied to one step after the given state. All integers wrap at 64 bits.

``position`` is the absolute position at which the picked token will stand, so a token's draw is the same whichever
slot, batch, process or speculation depth picks it.
"""

from __future__ import annotations

LANES = 4
PICK_LANE = 0
_WORD = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One output of the generator whose state is ``state``; both unsigned 64 bit."""
    z = (state + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def uniform(seed: int, position: int, lane: int = PICK_LANE) -> float:
    """A number in [0, 1), a multiple of 2**-53.

    Args:
        seed: unsigned 64 bit.
        position: absolute position of the token being picked, at least 0.
        lane: 0 picks tokens; 1 .. LANES - 1 are free for other decisions about the same token.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0 <= seed <= _WORD or position < 0 or not 0 <= lane < LANES:
        raise ValueError(f"no draw for seed {seed}, position {position}, lane {lane}")
    return (splitmix64(splitmix64((position * LANES + lane) & _WORD) ^ seed) >> 11) * 2.0**-53
