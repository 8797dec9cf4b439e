"""The levels of the codebooks. Torch-free: a config.json may state them."""

LEVELS = {
    3: (-127, -79, -45, -14, 14, 45, 79, 127),
    4: (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127),
    6: tuple(range(-32, 32)),
}
"""By bits, what a field stands for, before its scale."""
