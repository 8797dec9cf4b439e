"""Drafts of MiMo-V2.6-Flash that stand, past the end of the window of 16 rows."""

from dgpp_core.testing import DraftConformance, World


class TestMimo26Drafts(DraftConformance):
    """The kit's checks; rejected rows were written into the rings."""

    model = "mimo26-flash"

    def check(self, world: World, depth: int) -> None:
        """One block a draft."""
        assert len(world.engine.state.pools["draft_k"]) == depth
