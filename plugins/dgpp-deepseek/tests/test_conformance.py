"""DeepSeek-V4.1-Flash keeps every promise of the contract, and equals its equations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from torch import Tensor

from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.testing import ModelConformance
from dgpp_core.testing.matrix import Axes, exactness_matrix


class TestDeepseek41(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "deepseek41-flash"
    reply_tokens = 4
    worlds = (1, 2, 4)
    equations: ClassVar[ModuleType]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _equations(cls, reference: ModuleType) -> None:
        cls.equations = reference

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The equations, which round no row."""
        plain = self.equations.Plain(weights, config)
        logits: Tensor = plain.logits(plain.hidden(tokens)[0])
        return logits.float()

    @pytest.fixture(scope="class")
    @classmethod
    def unrounded(cls, plain_rows: LoadedModel) -> LoadedModel:
        return plain_rows

    def test_forward_equals_the_reference(
        self, unrounded: LoadedModel, folder: Path, prompts: list[list[int]]
    ) -> None:  # fmt: skip
        """As the kit does, with rows that are kept as they are computed."""
        super().test_forward_equals_the_reference(unrounded, folder, prompts)

    def test_exactness_matrix(self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]) -> None:
        """The kit's cells that differ most, and the deepest drafts."""
        axes = Axes(depths=(0, 2, 5), chunks=(16,), company=(0, 3), thin=True, max_tokens=self.reply_tokens)
        report = exactness_matrix(lambda *each: self.world(loaded, folder, *each), prompts, axes)
        assert not report.differences
        assert report.hits
        assert report.evictions

    def test_ranks_that_share_the_model_give_the_same_replies(
        self, unrounded: LoadedModel, folder: Path, prompts: list[list[int]]
    ) -> None:
        """As the kit does, with rows kept as they are computed.

        More ranks add a row's products in more parts. A value that lies between two that can be kept then becomes the
        other one, which is no longer a difference of rounding: rows as trained are held to the ranks' agreement below.
        """
        axes = Axes(
            worlds=(2, 4), depths=(5,), chunks=(16,), company=(2,), evicting=False, thin=True,
            max_tokens=self.reply_tokens,
        )  # fmt: skip
        report = exactness_matrix(lambda *each: self.world(unrounded, folder, *each), prompts, axes)
        assert not report.differences, f"the oracle's picks come as near to a tie as {report.smallest_gap}"

    def test_ranks_agree_with_rows_as_trained(
        self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]
    ) -> None:  # fmt: skip
        """To the bit, every tick; and drafts and company change no reply of two ranks."""
        found = []
        for depth, together in ((0, False), (5, True)):
            settings = EngineSettings(
                max_concurrency=4, kv_capacity=1024, block_tokens=16, mtp=depth > 0, mtp_depth=depth or 1
            )
            world = self.world(loaded, folder, settings, 0, 2)
            if together:
                requests = [world.submit(prompt, 4) for prompt in prompts[1:4]]
                replies = world.run()
                found.append([replies[request].tokens for request in requests])
            else:
                found.append([world.reply(prompt, 4).tokens for prompt in prompts[1:4]])
        assert found[0] == found[1]
