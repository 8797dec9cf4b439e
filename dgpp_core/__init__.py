"""dgpp: exact, loud and fast serving of large mixture-of-experts language models."""

__version__ = "0.1.0"
