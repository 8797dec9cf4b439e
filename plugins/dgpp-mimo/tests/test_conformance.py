"""MiMo-V2.6-Flash under the conformance kit, and its draft blocks, each against its equations in float64."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.testing import ModelConformance, World
from dgpp_core.testing.recorded import recorded_cases

TEMPLATES = Path(__file__).parents[4] / "shared" / "data" / "chat_templates"


class Plain:
    """The equations, a sequence at a time, from a dense checkpoint's tensors."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.w, self.c = weights, config

    def get(self, name: str) -> Tensor:
        return self.w[name].double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.get(f"{name}.weight").T

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.c["layernorm_epsilon"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.get(f"{name}.weight")

    def rope(self, x: Tensor, theta: float, dims: int) -> Tensor:
        """Dimensions i and i + dims / 2 of ``[T, heads, width]`` are a pair."""
        half = dims // 2
        angle = torch.arange(len(x)).double()[:, None, None] / theta ** (torch.arange(half).double() / half)
        first, second = x[..., :half], x[..., half:dims]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., dims:]), -1)

    def attention(self, name: str, x: Tensor, windowed: bool) -> Tensor:
        c, kind = self.c, "swa_" if windowed else ""
        heads, kv = c[f"{kind}num_attention_heads"], c[f"{kind}num_key_value_heads"]
        width, value, chunks, count = c[f"{kind}head_dim"], c[f"{kind}v_head_dim"], c["num_key_value_heads"], len(x)
        q, k, v = [], [], []
        for chunk in self.get(f"{name}.qkv_proj.weight").chunk(chunks):
            cut = chunk.split([heads // chunks * width, kv // chunks * width, kv // chunks * value])
            for rows, part in zip((q, k, v), cut, strict=True):
                rows.append(x @ part.T)
        dims = int(width * c["partial_rotary_factor"])
        turned = [
            self.rope(torch.cat(rows, -1).view(count, n, width), c[f"{kind}rope_theta"], dims)
            for rows, n in ((q, heads), (k, kv))
        ]
        values = c["attention_value_scale"] * torch.cat(v, -1).view(count, kv, value)
        at, outs = torch.arange(count), []
        reach = c["sliding_window"] if windowed else count
        hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - reach)
        for head in range(heads):
            own = head // (heads // kv)
            scores = (turned[0][:, head] @ turned[1][:, own].T / width**0.5).masked_fill(hidden, -torch.inf)
            if windowed:
                sink = self.get(f"{name}.attention_sink_bias")[head].expand(count, 1)
                scores = torch.cat((scores, sink), -1)
            outs.append(torch.softmax(scores, -1)[:, :count] @ values[:, own])
        return self.linear(f"{name}.o_proj", torch.cat(outs, -1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", F.silu(gate) * up)

    def mixture(self, name: str, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.linear(f"{name}.gate", x))
        chosen = (scores + self.get(f"{name}.gate.e_score_correction_bias")).topk(self.c["num_experts_per_tok"]).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                out[row] += weight * self.feed_forward(f"{name}.experts.{expert}", x[row])
        return out

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """States after the last norm."""
        x = self.get("model.embed_tokens.weight")[list(tokens)]
        for layer, windowed in enumerate(self.c["hybrid_layer_pattern"]):
            name = f"model.layers.{layer}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x), bool(windowed))
            mlp = self.mixture if self.c["moe_layer_freq"][layer] else self.feed_forward
            x = x + mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        return self.norm("model.norm", x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear("lm_head", hidden)

    def drafted(self, block: int, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """A block's rows, normed: row r has the state of row r and the token given for it."""
        name = f"model.mtp.layers.{block}"
        embedded = self.norm(f"{name}.enorm", self.get("model.embed_tokens.weight")[list(tokens)])
        z = self.linear(f"{name}.eh_proj", torch.cat((embedded, self.norm(f"{name}.hnorm", hidden)), -1))
        z = z + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", z), True)
        z = z + self.feed_forward(f"{name}.mlp", self.norm(f"{name}.pre_mlp_layernorm", z))
        return self.norm(f"{name}.final_layernorm", z)

    def chain(self, tokens: list[int], following: int, depth: int) -> list[int]:
        """The drafts after ``tokens`` and the picked token: block d sees the text shifted by d + 1."""
        hidden, text, drafts = self.hidden(tokens), [*tokens, following], []
        for block in range(depth):
            own = self.drafted(block, hidden, text[1 + block :])
            drafts.append(int(self.logits(own)[-1].argmax()))
            text.append(drafts[-1])
        return drafts


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


class TestMimo26(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "mimo26-flash"
    template = TEMPLATES / "MiMo-V2.6.distill.jinja"
    reply_tokens = 4
    worlds = (1, 2, 4)

    @classmethod
    def golden_cases(cls) -> Mapping[str, Mapping[str, Any]]:
        """Prompts recorded from transformers, beside the checkout where they are there at all."""
        # Arguments that come as text are read here; the recorder handed them on as they were.
        text = {"string_arguments": ('{"city": "Oslo"}', "<parameter=city>Oslo</parameter>")}
        return recorded_cases(TEMPLATES / "golden", "MiMo-V2.6.distill", text)

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The equations."""
        plain = Plain(weights, config)
        return plain.logits(plain.hidden(tokens)).float()


class TestDraftBlocks:
    """The blocks against their equations, and what their drafts come to."""

    tokens = torch.randint(512, (60,), generator=torch.Generator().manual_seed(9)).tolist()
    folder = TestMimo26.folder
    model = "mimo26-flash"

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> LoadedModel:
        return TestMimo26.host().model(cls.model)

    @pytest.fixture
    def world(self, loaded: LoadedModel, folder: Path) -> World:
        settings = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=True, mtp_depth=3)
        return World.from_checkpoint(loaded, folder, settings)

    @pytest.fixture
    def plain(self, folder: Path) -> Plain:
        return Plain(load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()))

    def batch(self, start: int, count: int, *, decode: bool) -> StepBatch:
        """Rows of a text whose blocks are 1, 2, 3, ..."""
        at = torch.arange(start, start + count)
        return StepBatch(
            tokens=torch.tensor(self.tokens)[at], positions=at, counts=(count,), slots=torch.tensor([1]),
            lengths=torch.tensor([start]), block_tables=torch.arange(1, 5)[None], candidates=torch.tensor([0]),
            keep_rows=decode, max_length=start + count,
        )  # fmt: skip

    @torch.inference_mode()
    def observed(self, world: World, counts: list[int], *, decode: bool, wrong: int = 0) -> Tensor:
        """The first block's states of all rows, run so many a step; ``wrong`` rows of other tokens after each step."""
        drafter, pools, rows, start = world.engine.drafter, world.engine.state.pools, [], 0
        assert drafter is not None
        for count in counts:
            batch = self.batch(start, count + wrong, decode=decode)
            if wrong:
                batch.tokens[count:] = 7
            hidden = world.engine.model.forward(batch, pools)
            following = torch.tensor([*self.tokens[start + 1 : start + count + 1], *[9] * wrong])
            rows.append(drafter.observe(batch, hidden, following, pools)[:count])
            start += count
        return torch.cat(rows)

    @torch.inference_mode()
    def proposed(self, world: World, own: Tensor, depth: int) -> list[int]:
        """Drafts after all rows that were observed."""
        drafter, end = world.engine.drafter, len(own)
        assert drafter is not None
        tail, following = self.batch(end - 1, 1, decode=True), torch.tensor([self.tokens[end]])
        (drafts,) = drafter.propose(tail, own[-1:], following, depth, world.engine.state.pools).tolist()
        return [int(draft) for draft in drafts]

    def test_the_first_block_equals_its_equations(self, world: World, plain: Plain) -> None:
        wanted = plain.drafted(0, plain.hidden(self.tokens[:50]), self.tokens[1:51])
        whole = self.observed(world, [50], decode=False)
        assert relative(whole, wanted) < 1e-5
        assert torch.equal(self.observed(world, [1] * 50, decode=True), whole)
        assert torch.equal(self.observed(world, [2, 7, 1, 16, 24], decode=False), whole)

    @pytest.mark.parametrize("length", [1, 2, 3, 4, 17, 50])
    def test_drafts_are_those_of_three_blocks_over_the_whole_text(
        self, world: World, plain: Plain, length: int
    ) -> None:
        wanted = plain.chain(self.tokens[:length], self.tokens[length], 3)
        for depth in (1, 2, 3):
            own = self.observed(world, [length], decode=False)
            assert self.proposed(world, own, depth) == wanted[:depth]

    def test_every_way_through_leaves_the_same_state(self, world: World, plain: Plain) -> None:
        """Bits of every block's rows in reach, and so the drafts, after chunks, single rows and rejected drafts."""
        rings = ("draft_k", "draft_v", "draft_hidden")
        own = self.observed(world, [50], decode=False)
        wanted = self.kept(world, rings)
        assert self.proposed(world, own, 3) == plain.chain(self.tokens[:50], self.tokens[50], 3)
        for counts, decode, wrong in (
            ([1, 1, 1, 20, 27], False, 0), ([1] * 50, True, 0), ([1, 2, 1, 3] * 7 + [1], True, 1),
        ):  # fmt: skip
            assert sum(counts) == 50
            for count in counts:
                assert count + wrong <= 4 or not decode
            self.observed(world, counts, decode=decode, wrong=wrong)
            assert all(torch.equal(*pair) for pair in zip(self.kept(world, rings), wanted, strict=True))

    def kept(self, world: World, names: tuple[str, ...]) -> list[Tensor]:
        """The rows that a step at position 50 may read of each block."""
        found = []
        for name in names:
            pool = world.engine.state.pools[name]
            for lag in range(pool.shape[0]):
                end, reach = (50, 2) if name == "draft_hidden" else (50 - lag, 15)
                found.append(pool[lag, 1][:, torch.arange(end - reach, end) % pool.shape[3]].clone())
        return found

    def test_drafts_in_company(self, world: World, plain: Plain) -> None:
        """Two requests of different lengths in one call draft what each drafts alone."""
        drafter, pools = world.engine.drafter, world.engine.state.pools
        assert drafter is not None
        at = torch.cat((torch.arange(20), torch.arange(33)))
        text = torch.tensor(self.tokens)
        batch = StepBatch(
            tokens=text[at], positions=at, counts=(20, 33), slots=torch.tensor([0, 1]), lengths=torch.tensor([0, 0]),
            block_tables=torch.arange(1, 9).view(2, 4), candidates=torch.tensor([0, 0]), keep_rows=False, max_length=33,
        )  # fmt: skip
        with torch.inference_mode():
            hidden = world.engine.model.forward(batch, pools)
            own = drafter.observe(batch, hidden, text[at + 1], pools)
            tail = StepBatch(
                tokens=text[[19, 32]], positions=torch.tensor([19, 32]), counts=(1, 1), slots=torch.tensor([0, 1]),
                lengths=torch.tensor([19, 32]), block_tables=batch.block_tables, candidates=batch.candidates,
                keep_rows=True, max_length=33,
            )  # fmt: skip
            drafts = drafter.propose(tail, own[[19, 52]], text[[20, 33]], 3, pools)
        assert drafts.tolist() == [plain.chain(self.tokens[:n], self.tokens[n], 3) for n in (20, 33)]
