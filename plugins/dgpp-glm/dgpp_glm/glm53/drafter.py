"""The draft layer of GLM-5.3."""

from __future__ import annotations

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.norm import rms_norm
from dgpp_glm.drafter import MtpDrafter
from dgpp_glm.glm53.config import Glm53Config
from dgpp_glm.glm53.model import Glm53Model, decoder_layer
from dgpp_glm.latent import Step


class Glm53Drafter(MtpDrafter):
    """A decoder layer with latent rows and an indexer of its own.

    It chooses its keys anew at each depth. A config's ``index_share_for_mtp_iteration`` would let deeper rows attend to
    the first one's choice, which lacks the rows since: other drafts, and the same replies.
    """

    def __init__(self, config: Glm53Config, shard: Shard, model: Glm53Model, depth: int) -> None:
        super().__init__(config, shard, model, depth)
        self.layer = decoder_layer(config, shard, config.num_hidden_layers, model.rope)

    def through_layer(self, stream: Stream, batch: StepBatch, state: State) -> Tensor:
        """See `MtpDrafter`."""
        x = rms_norm(stream.residual, self.layer.attention_norm, self.eps, self.target.dtype)
        return self.layer(x, stream, self.norm, Step.of(batch, state), ())[0]
