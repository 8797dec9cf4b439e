"""Names that were probably meant."""

import pytest

from dgpp_core.api.nearest import did_you_mean, nearest

MODELS = ("glm47", "glm53", "glm53-flash", "qwen38-flash-next", "mimo26-flash")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("glm48", "glm47"),
        ("glm53-flsh", "glm53-flash"),
        ("glm53-f", "glm53-flash"),  # glm53 is spelt more alike
        ("glm5", "glm53"),
        ("qwen38", "qwen38-flash-next"),
        ("mimo", "mimo26-flash"),
        ("g", ""),
        ("", ""),
        ("llama", ""),
    ],
)
def test_what_was_meant(name: str, meant: str) -> None:
    assert nearest(name, MODELS) == meant
    assert did_you_mean(name, MODELS) == (f"did you mean `{meant}`?" if meant else "")
