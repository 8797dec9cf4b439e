"""The sampler as the engine uses it: slots, batches, counts, drafts, masks, logprobs and faults."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dgpp_core.api.errors import EngineError, RequestError
from dgpp_core.engine.operations import TokenLogprobs as OperationsTokenLogprobs
from dgpp_core.sampling.logprobs import TokenLogprobs
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.sampling.pick import Sampler
from dgpp_core.sampling.random import uniform

CPU = torch.device("cpu")
MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=40, min_p=0.01),
    SamplingParams(seed=4, repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=0.2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(seed=5, logit_bias=((3, 2.5), (40, -9.0))),
]


def noise(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    biased = sorted(rng.sample(range(vocab), rng.choice([0, 0, 1, vocab // 2])))
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.4, 1.0, 1.0, 3.0]),
        top_k=rng.choice([0, 0, 1, 4]),
        top_p=rng.choice([1.0, 0.9, rng.random() or 1.0]),
        min_p=rng.choice([0.0, 0.0, rng.random()]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2, 0.5, 3.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3, -1.1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -0.2]),
        seed=rng.getrandbits(64),
        logit_bias=tuple((token, rng.uniform(-5, 5)) for token in biased),
    )


def test_every_parameter_together_equals_brute_force(reference: Callable[..., Any]) -> None:
    rng, ambiguous, cases = random.Random(7), 0, 2500
    for case in range(cases):
        vocab = rng.randint(2, 30)
        sampler, params = Sampler(vocab, 4, CPU), random_params(rng, vocab)
        prompt, output, drafts = ([rng.randrange(vocab) for _ in range(rng.randint(0, 6))] for _ in range(3))
        allowed = [rng.random() < 0.7 for _ in range(vocab)]
        allowed[rng.randrange(vocab)] = True
        row = [float(np.float32(rng.gauss(0, 3))) for _ in range(vocab)]
        row = [float(round(x)) for x in row] if rng.random() < 0.3 else row
        slot, position, wanted = rng.randrange(4), rng.randrange(10**6), rng.randint(-1, 5)
        sampler.begin(slot, params, prompt, wanted)
        sampler.commit(slot, output)
        logits = torch.where(torch.tensor(allowed), torch.tensor(row), -torch.inf)
        picks = sampler.pick(logits.unsqueeze(0), [slot], [position], [drafts])
        expected = reference(
            row,
            params,
            uniform(params.seed, position),
            history=[*prompt, *output, *drafts],
            allowed=allowed,
            alternatives=max(wanted, 0),
        )
        if expected.margin < 1e-9:
            ambiguous += 1
            continue
        assert picks.tokens.tolist() == [expected.token], (case, params)
        if wanted < 0:
            assert picks.logprobs == (None,)
            continue
        assert picks.logprobs[0] is not None
        assert picks.logprobs[0].logprob == pytest.approx(expected.logprob, abs=1e-6)
        assert [t for t, _ in picks.logprobs[0].top] == [t for t, _ in expected.top]
        assert [p for _, p in picks.logprobs[0].top] == pytest.approx([p for _, p in expected.top], abs=1e-6)
    assert ambiguous < cases / 50


@pytest.mark.parametrize("vocab", [1, 2, 1000, 49_152])
def test_greedy_takes_the_lower_id_of_a_tie(vocab: int) -> None:
    sampler = Sampler(vocab, 1, CPU)
    sampler.begin(0, GREEDY, [0], -1)
    logits = noise(6, vocab).clamp(max=0.5)
    picks = sampler.pick(logits, [0] * 6, range(6))
    assert picks.tokens.dtype == torch.int64
    assert picks.tokens.tolist() == [int(np.argmax(row)) for row in logits.numpy()]
    assert picks.logprobs == (None,) * 6


@pytest.mark.parametrize("wanted", [-1, 4])
def test_row_depends_neither_on_slot_nor_on_batch(wanted: int) -> None:
    """A request beside others, seeded alike, otherwise or not at all, in any slot and order."""
    vocab = 5000
    logits, rng = noise(len(MIXED), vocab), random.Random(3)
    alone = []
    for row, params in enumerate(MIXED):
        sampler = Sampler(vocab, 1, CPU)
        sampler.begin(0, params, [3, 3, 7], wanted)
        picks = sampler.pick(logits[row : row + 1], [0], [50 + row])
        alone.append((picks.tokens.tolist()[0], picks.logprobs[0]))
    for _ in range(30):
        slots = rng.sample(range(32), len(MIXED))
        order = rng.sample(range(len(MIXED)), rng.randint(1, len(MIXED)))
        sampler = Sampler(vocab, 32, CPU)
        for row in order:
            sampler.begin(slots[row], MIXED[row], [3, 3, 7], wanted)
        picks = sampler.pick(logits[order], [slots[row] for row in order], [50 + row for row in order])
        assert list(zip(picks.tokens.tolist(), picks.logprobs, strict=True)) == [alone[row] for row in order]


def test_twins_in_two_slots_say_the_same() -> None:
    sampler, params = Sampler(300, 8, CPU), SamplingParams(seed=42)
    sampler.begin(1, params, [5], 2)
    sampler.begin(6, params, [5], 2)
    for position in range(40):
        row = noise(1, 300, position)
        picks = sampler.pick(row.expand(2, -1), [1, 6], [position] * 2)
        assert picks.tokens[0] == picks.tokens[1]
        assert picks.logprobs[0] == picks.logprobs[1]


def test_seeds_and_positions_differ() -> None:
    sampler = Sampler(1000, 2, CPU)
    sampler.begin(0, SamplingParams(seed=1), [5], -1)
    sampler.begin(1, SamplingParams(seed=2), [5], -1)
    flat = torch.zeros(50, 1000)
    one, two = (sampler.pick(flat, [slot] * 50, range(50)).tokens.tolist() for slot in (0, 1))
    assert len(set(one)) > 40
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 5


SCRIPT = """
import sys, torch
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.sampling.pick import Sampler
torch.set_num_threads(int(sys.argv[1]))
logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [1.0], [3.0], [6.0]])
sampler = Sampler(49152, 40, torch.device("cpu"))
slot = 0
for temperature in (0.0, 0.7, 1.0):
    for top_p, min_p, top_k in ((1.0, 0.0, 0), (0.9, 0.0, 0), (1.0, 0.05, 0), (0.95, 0.01, 3000)):
        for penalty in (1.0, 1.2):
            params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=slot,
                                    repetition_penalty=penalty)
            sampler.begin(slot, params, range(1000), 3)
            picks = sampler.pick(logits, [slot] * 4, range(slot, slot + 4))
            for token, found in zip(picks.tokens.tolist(), picks.logprobs):
                print(token, found.logprob.hex(), [(i, p.hex()) for i, p in found.top])
            slot += 1
"""


def test_process_hash_seed_and_threads_change_nothing() -> None:
    """Bit for bit, logprobs too."""

    def run(hash_seed: str, threads: int) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", SCRIPT, str(threads)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    first = run("1", 1)
    assert len(first.splitlines()) == 96
    assert run("2", 3) == first


class Markov:
    """A language model of ``vocab`` tokens whose logits depend on the last two tokens."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.table = vocab, noise(vocab * vocab, vocab, seed, 1.5)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.table[tokens[-2] * self.vocab + tokens[-1]]


PROMPT = [0, 1]


def plain(model: Markov, params: SamplingParams, length: int) -> tuple[list[int], list[TokenLogprobs | None]]:
    sampler, tokens = Sampler(model.vocab, 1, CPU), list(PROMPT)
    logprobs: list[TokenLogprobs | None] = []
    sampler.begin(0, params, PROMPT, 2)
    for _ in range(length):
        picks = sampler.pick(model.logits(tokens).unsqueeze(0), [0], [len(tokens)])
        sampler.commit(0, picks.tokens.tolist())
        tokens += picks.tokens.tolist()
        logprobs += picks.logprobs
    return tokens, logprobs


def drafted(
    model: Markov, params: SamplingParams, length: int, depth: int, drafter: Callable[[list[int]], int]
) -> tuple[list[int], list[TokenLogprobs | None], int]:
    """Sample and match: the tokens, their logprobs and how many were drafts."""
    sampler, tokens, accepted = Sampler(model.vocab, 1, CPU), list(PROMPT), 0
    logprobs: list[TokenLogprobs | None] = []
    sampler.begin(0, params, PROMPT, 2)
    while len(tokens) < len(PROMPT) + length:
        drafts: list[int] = []
        for _ in range(depth):
            drafts.append(drafter(tokens + drafts))
        tails = [drafts[:row] for row in range(depth + 1)]
        rows = torch.stack([model.logits(tokens + tail) for tail in tails])
        positions = range(len(tokens), len(tokens) + depth + 1)
        picks = sampler.pick(rows, [0] * (depth + 1), positions, tails)
        picked = picks.tokens.tolist()
        good = next((i for i, draft in enumerate(drafts) if draft != picked[i]), depth)
        sampler.commit(0, picked[: good + 1])
        tokens += picked[: good + 1]
        logprobs += picks.logprobs[: good + 1]
        accepted += good
    return tokens[: len(PROMPT) + length], logprobs[:length], accepted


@pytest.mark.parametrize("params", MIXED, ids=range(len(MIXED)))
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drafted_stream_equals_plain_stream(params: SamplingParams, depth: int) -> None:
    """Tokens and logprobs bit for bit, with drafts that are often right, often wrong."""
    model, rng = Markov(50, 4), random.Random(depth)
    expected = plain(model, params, 120)

    def drafter(tokens: list[int]) -> int:
        likeliest = int(model.logits(tokens).argmax())
        return likeliest if rng.random() < 0.8 else rng.randrange(model.vocab)

    tokens, logprobs, accepted = drafted(model, params, 120, depth, drafter)
    assert (tokens, logprobs) == expected
    assert any(found is not None and found.logprob < 0 for found in logprobs)
    assert accepted > 5


def test_sample_and_match_keeps_the_distribution(reference: Callable[..., Any]) -> None:
    """Pairs of tokens over 100,000 seeds, the first of them drafted: chi-square, and a draft stands as often as p."""
    model, seeds, base = Markov(4, 9), 100_000, SamplingParams(temperature=1.2)

    def chances(tokens: list[int]) -> list[float]:
        found = reference(model.logits(tokens).tolist(), base, 0.5).probabilities
        return [found[t] for t in range(model.vocab)]

    def walk(tokens: list[int], draws: Any) -> Any:
        """The tokens at many draws: the canonical order's running sums, spot-checked against the sampler below."""
        row, p = model.logits(tokens).tolist(), np.array(chances(tokens))
        order = np.array(sorted(range(model.vocab), key=lambda t: (-row[t], t)))
        return order[np.searchsorted(np.cumsum(p[order]), draws, side="right").clip(max=model.vocab - 1)]

    draft = int(model.logits(PROMPT).argmax())
    first_draws, second_draws = (np.array([uniform(s, len(PROMPT) + i) for s in range(seeds)]) for i in (0, 1))
    first = walk(PROMPT, first_draws)
    seconds = np.stack([walk([*PROMPT, t], second_draws) for t in range(model.vocab)])
    second = seconds[first, np.arange(seeds)]
    for seed in range(400):
        params = SamplingParams(temperature=1.2, seed=seed)
        tokens, _, accepted = drafted(model, params, 2, 1, lambda tokens: draft if len(tokens) == 2 else 0)
        assert tokens[2:] == [first[seed], second[seed]]
        assert accepted == (tokens[2] == draft or tokens[3] == 0)
    p = np.array(chances(PROMPT))
    joint = p[:, None] * np.array([chances([*PROMPT, t]) for t in range(model.vocab)])
    cells = np.bincount(first * model.vocab + second, minlength=model.vocab**2).reshape(joint.shape)
    assert float(((cells - seeds * joint) ** 2 / (seeds * joint)).sum()) < 50  # 15 degrees of freedom: chance 1e-5
    stands = float((first == draft).mean())
    assert abs(stands - p[draft]) < 5 * math.sqrt(p[draft] * (1 - p[draft]) / seeds)


def test_counts_follow_prompt_and_committed_tokens_alone() -> None:
    sampler = Sampler(6, 2, CPU)
    flat, at = torch.zeros(1, 6), [9]
    sampler.begin(0, SamplingParams(temperature=0.0, frequency_penalty=1.0), [0, 0, 1], -1)
    assert sampler.pick(flat, [0], at).tokens.tolist() == [2]
    assert sampler.pick(flat, [0], at, [[2, 3]]).tokens.tolist() == [4]  # drafts count for their row alone
    assert sampler.pick(flat, [0], at).tokens.tolist() == [2]
    sampler.commit(0, [2, 3, 4, 5, 5])
    assert sampler.pick(flat, [0], at).tokens.tolist() == [1]
    sampler.release(0)
    sampler.begin(0, SamplingParams(temperature=0.0, frequency_penalty=1.0), [], -1)
    assert sampler.pick(flat, [0], at).tokens.tolist() == [0]


@pytest.mark.parametrize("params", MIXED, ids=range(len(MIXED)))
def test_masked_tokens_do_not_exist(params: SamplingParams) -> None:
    sampler, logits = Sampler(64, 1, CPU), noise(40, 64)
    sampler.begin(0, params, [1], 20)
    masks = torch.zeros(40, 64, dtype=torch.bool)
    for row, mask in enumerate(masks):
        mask[[row, (row + 7) % 64, (row + 20) % 64]] = True
    picks = sampler.pick(logits.masked_fill(~masks, -torch.inf), [0] * 40, range(40))
    for token, found, mask in zip(picks.tokens.tolist(), picks.logprobs, masks, strict=True):
        assert mask[token]
        assert found is not None
        assert 1 <= len(found.top) <= 3
        assert all(mask[other] for other, _ in found.top)
        if params.temperature == 0:
            assert math.fsum(math.exp(p) for _, p in found.top) == pytest.approx(1)


def test_greedy_logprobs_are_the_log_softmax() -> None:
    """At temperature 0, whatever the filters say, drafted or not."""
    sampler, logits = Sampler(49_152, 1, CPU), noise(3, 49_152)
    sampler.begin(0, SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9), [0], 20)
    picks = sampler.pick(logits, [0] * 3, range(3), [[], [1], [1, 2]])
    expected = torch.log_softmax(logits.double(), 1)
    values, ids = expected.topk(20)
    for row, found in enumerate(picks.logprobs):
        assert found is not None
        assert found.logprob == pytest.approx(float(values[row, 0]), abs=1e-6)
        assert found.logprob < 0
        assert [t for t, _ in found.top] == ids[row].tolist()
        assert [p for _, p in found.top] == pytest.approx(values[row].tolist(), abs=1e-6)


@pytest.mark.parametrize("wanted", [-1, 0, 3])
def test_as_many_alternatives_as_asked(wanted: int) -> None:
    sampler = Sampler(50, 2, CPU)
    sampler.begin(0, SamplingParams(), [0], wanted)
    sampler.begin(1, GREEDY, [0], wanted)
    for found in sampler.pick(noise(2, 50), [0, 1], [1, 1]).logprobs:
        assert (found is None) == (wanted < 0)
        assert found is None or len(found.top) == wanted


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-30, top_p=1e-9, top_k=2**31, min_p=1.0, seed=2**64 - 1),
        SamplingParams(temperature=1e300, repetition_penalty=1e-300),
        SamplingParams(temperature=1e-5, repetition_penalty=100.0, frequency_penalty=1e300),
        SamplingParams(presence_penalty=-1e300, logit_bias=((0, -100.0), (99, 100.0))),
    ],
    ids=range(4),
)
def test_ends_of_the_ranges_pick_a_token(params: SamplingParams) -> None:
    sampler = Sampler(100, 1, CPU)
    sampler.begin(0, params, [0, 5, 5], 3)
    picks = sampler.pick(noise(5, 100), [0] * 5, range(5))
    assert all(0 <= token < 100 for token in picks.tokens.tolist())
    for found in picks.logprobs:
        assert found is not None
        assert all(math.isfinite(p) and p <= 0 for p in (found.logprob, *(p for _, p in found.top)))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), MIXED[4]], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_row_without_a_finite_maximum_names_its_slot(params: SamplingParams, value: float) -> None:
    sampler = Sampler(20, 8, CPU)
    sampler.begin(2, params, [1], -1)
    sampler.begin(5, params, [1], -1)
    logits = noise(2, 20)
    logits[1, :] = value if value == -math.inf else logits[1]
    logits[1, 13] = value
    with pytest.raises(EngineError, match="no finite largest value") as caught:
        sampler.pick(logits, [2, 5], [10, 11])
    assert caught.value.where == "slot 5, position 11"
    assert caught.value.found == str(value)
    assert 0 <= sampler.pick(logits[:1], [2], [10]).tokens.tolist()[0] < 20


@pytest.mark.parametrize(
    ("params", "prompt", "named"),
    [
        (SamplingParams(logit_bias=((99999999, 5.0),)), [0], "99999999"),
        (SamplingParams(temperature=-1.0), [0], "temperature"),
        (SamplingParams(presence_penalty=1.0), [0, 64], "64"),
        (SamplingParams(presence_penalty=1.0), [-1], "-1"),
    ],
)
def test_refused_request_leaves_the_slot_free(params: SamplingParams, prompt: list[int], named: str) -> None:
    sampler = Sampler(64, 2, CPU)
    sampler.begin(1, GREEDY, [0], -1)
    with pytest.raises(RequestError, match=named):
        sampler.begin(0, params, prompt, -1)
    sampler.begin(0, GREEDY, [0], -1)
    row = noise(1, 64)
    assert sampler.pick(row.repeat(2, 1), [0, 1], [1, 1]).tokens.tolist() == [int(row.argmax())] * 2


def test_slots_are_taken_once_and_exist() -> None:
    sampler = Sampler(8, 2, CPU)
    sampler.begin(1, GREEDY, [0], -1)
    with pytest.raises(EngineError, match="cannot take") as caught:
        sampler.begin(1, GREEDY, [0], -1)
    assert (caught.value.where, caught.value.found) == ("slot 1", "taken")
    with pytest.raises(EngineError, match="cannot take"):
        sampler.begin(2, GREEDY, [0], -1)
    with pytest.raises(EngineError, match="free slot") as caught:
        sampler.pick(noise(1, 8), [0], [1])
    assert caught.value.where == "slot 0"
    with pytest.raises(EngineError, match="free slot"):
        sampler.commit(0, [1])
    sampler.release(0)
    sampler.release(1)
    sampler.begin(1, GREEDY, [0], -1)


@pytest.mark.parametrize(
    ("logits", "slots", "positions", "drafts"),
    [
        (torch.zeros(2, 8), [0], [1], None),
        (torch.zeros(1, 9), [0], [1], None),
        (torch.zeros(1, 8, dtype=torch.float64), [0], [1], None),
        (torch.zeros(1, 8), [0], [1, 2], None),
        (torch.zeros(1, 8), [0], [1], [[], []]),
    ],
)
def test_rows_that_do_not_fit_together(logits: Tensor, slots: Any, positions: Any, drafts: Any) -> None:
    sampler = Sampler(8, 2, CPU)
    sampler.begin(0, GREEDY, [0], -1)
    with pytest.raises(EngineError, match="do not fit together"):
        sampler.pick(logits, slots, positions, drafts)


def test_no_rows() -> None:
    picks = Sampler(8, 2, CPU).pick(torch.zeros(0, 8), [], [])
    assert (picks.tokens.tolist(), picks.logprobs) == ([], ())


def test_counts_take_what_is_planned() -> None:
    sampler = Sampler(1000, 3, CPU)
    for slot, params in enumerate([SamplingParams(presence_penalty=1.0), GREEDY, SamplingParams(top_k=3)]):
        sampler.begin(slot, params, [1], -1)
    counts = [state.counts for state in sampler._slots.values()]
    assert [None if c is None else c.nbytes for c in counts] == [Sampler.bytes_planned(1000, 1), None, None]
    assert Sampler.bytes_planned(1000, 3) == 3 * 1000 * 4


def test_logprobs_are_one_type() -> None:
    assert OperationsTokenLogprobs is TokenLogprobs
