"""YaRN's frequencies are those of transformers, and of recorded bits."""

import struct

import pytest
import torch

from dgpp_core.ops.rope import RotaryTable, yarn_frequencies, yarn_scale

LENGTH, THETA, WIDTH = 262144, 1e7, 64
RECORDED = {
    4: {16: "39a5cb60", 17: "393bdab5", 20: "3804a77e", 23: "36afa3bd", 24: "363cb0c1", 31: "33b1af44"},
    1: {13: "3abbd3ed", 14: "3a6301e2", 15: "3a009b22", 18: "38b5a1aa", 21: "37707cc9", 22: "37012dab", 31: "33b1af44"},
}


def bits(value: float) -> str:
    return struct.pack(">f", value).hex()


@pytest.mark.parametrize("multiple", RECORDED)
def test_recorded_bits(multiple: int) -> None:
    found = yarn_frequencies(WIDTH, THETA, 2.0, multiple * LENGTH).tolist()
    assert {at: bits(found[at]) for at in RECORDED[multiple]} == RECORDED[multiple]
    assert bits(yarn_scale(2.0)) == "3f88df4e"


def test_those_of_transformers() -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    for factor, theta, width, length in ((2.0, THETA, WIDTH, LENGTH), (8.0, 1e4, 32, 4096), (4.0, 1e4, 16, 256)):
        parameters = {
            "rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": length,
        }  # fmt: skip
        config = LlamaConfig(
            hidden_size=4 * width, num_attention_heads=4, head_dim=width, rope_parameters=parameters,
            max_position_embeddings=int(factor * length),
        )  # fmt: skip
        wanted, scale = rope.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        assert torch.allclose(yarn_frequencies(width, theta, factor, length), wanted, rtol=1e-6)
        assert yarn_scale(factor) == pytest.approx(scale)


def test_the_scale_is_that_of_cosines_and_sines() -> None:
    cpu, frequencies = torch.device("cpu"), yarn_frequencies(16, 1e4, 4.0, 256)
    plain, scaled = (RotaryTable(16, 50, 1e4, cpu, frequencies, scale) for scale in (1.0, yarn_scale(4.0)))
    assert torch.allclose(scaled.cos, plain.cos * yarn_scale(4.0))
    assert torch.allclose(scaled.cos**2 + scaled.sin**2, torch.tensor(yarn_scale(4.0) ** 2))
