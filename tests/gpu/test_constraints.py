"""Replies held to grammars on a GPU: masks reach the picks of captured steps, alone and beside free replies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.ops.forbid import forbid
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import World
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

END = 256
PIECES = [*(bytes([byte]) for byte in range(256)), b"<end>", b'{"', b'":', b"12", b"ab"]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
CODE = Grammar(source=sources.regex("[abc]{9}-[0-9]{6}"), ends=(END,))
OBJECT = Grammar(source=sources.json_schema(SCHEMA | {"additionalProperties": False}), ends=(END,))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = load_plugins(environ={}).model("smollm2")
    folder, raw = tmp_path_factory.mktemp("tiny"), model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4)
    return folder


@pytest.fixture(params=[0, 1])
def world(checkpoint: Path, request: pytest.FixtureRequest) -> World:
    settings = EngineSettings(max_concurrency=4, kv_capacity=2048, block_tokens=16, prefix_cache_gib=0.0)
    model = load_plugins(environ={}).model("smollm2")
    made = World.from_checkpoint(model, checkpoint, settings, lag=request.param, device="cuda")
    made.engine.offer_grammars(Vocabulary(PIECES, frozenset({END}), frozenset(), made.engine.vocab_size, END))
    return made


@pytest.mark.parametrize("vocab", [129, 49_152, 151_552])
def test_masks_forbid_on_the_device_what_they_forbid_on_the_host(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (9, (vocab + 31) // 32), generator=generator).int()
    masks[3], masks[4], masks[5, 1:] = -1, 0, 0
    device = logits.cuda()
    forbid(device[1:8], masks[1:8].cuda())
    assert torch.equal(device[[0, 8]].cpu(), logits[[0, 8]])
    forbid(logits, masks)
    assert torch.equal(device[1:8].cpu(), logits[1:8])


def test_the_device_picks_for_replies_that_are_held(world: World) -> None:
    for params in (
        GREEDY,
        SamplingParams(temperature=1.3, seed=3),
        SamplingParams(temperature=0.0, logit_bias=((1, 2.0),)),
    ):
        world.submit(range(1, 21), 100, params=params, eos_ids=(END,), grammar=CODE)
    world.tick()
    assert [info.mode for _, info in sorted(world.engine.slots.items())] == ["greedy", "device", "host"]
    world.run()


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.3, seed=3), SamplingParams(top_p=0.9, top_k=5, seed=1)]
)
def test_the_device_draws_what_the_host_would(world: World, params: SamplingParams) -> None:
    """With log-probabilities the host's sampler picks, from the same rows."""
    requests = [
        world.submit(range(1, 21), 100, params=params, logprobs=logprobs, eos_ids=(END,), grammar=CODE)
        for logprobs in (-1, 0)
    ]
    replies = world.run()
    assert replies[requests[0]].tokens == replies[requests[1]].tokens


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.3, seed=3)])
def test_replies_conform_and_do_not_depend_on_company(world: World, params: SamplingParams) -> None:
    def submit(grammar: Grammar | None) -> int:
        return world.submit(range(1, 21), 200, params=params, eos_ids=(END,), grammar=grammar)

    alone = []
    for grammar in (CODE, OBJECT, None):
        alone.append(submit(grammar))
        world.run()
    together = [submit(grammar) for grammar in (CODE, OBJECT, None)]
    replies = world.run()
    assert [replies[request].tokens for request in together] == [replies[request].tokens for request in alone]
    code, found = (b"".join(PIECES[token] for token in replies[request].tokens[:-1]) for request in together[:2])
    assert re.fullmatch(rb"[abc]{9}-[0-9]{6}", code)
    assert set(json.loads(found)) == {"n"}
