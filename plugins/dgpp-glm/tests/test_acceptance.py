"""Drafts of GLM-4.7 that stand, and some that do not; also from the cache, in chunks and in company."""

from pathlib import Path

from dgpp_core.config.settings import EngineSettings
from dgpp_core.testing import Axes, DraftConformance, World, exactness_matrix
from dgpp_core.testing.known_drafts import KnowingModel


class TestGlm47Drafts(DraftConformance):
    """The kit's checks, and the matrix's."""

    model = "glm47"
    lengths = (37, 5, 18, 33)
    reply_tokens = 24
    cases = ((1, 0), (3, 0), (5, 0))

    def test_the_matrix(self, folder: Path, prompts: list[list[int]], texts: list[list[int]]) -> None:
        """With one draft in three wrong."""
        axes = Axes(depths=(2, 5), chunks=(16,), company=(3,), max_tokens=12)
        model = KnowingModel(self.loaded(), texts, 3)

        def make(settings: EngineSettings, lag: int, ranks: int) -> World:
            return World.from_checkpoint(model, folder, settings, lag=lag)

        report = exactness_matrix(make, prompts, axes)
        assert not report.differences
        assert report.accepted > report.compared
        assert report.hits
        assert report.evictions
