"""The draft layer of GLM-4.7."""

from __future__ import annotations

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.norm import rms_norm
from dgpp_glm.drafter import MtpDrafter
from dgpp_glm.glm47.config import Glm47Config
from dgpp_glm.glm47.model import Glm47Model, Layer, Step


class Glm47Drafter(MtpDrafter):
    """A decoder layer with keys and values of its own."""

    def __init__(self, config: Glm47Config, shard: Shard, model: Glm47Model, depth: int) -> None:
        super().__init__(config, shard, model, depth)
        self.layer = Layer(config, shard, config.num_hidden_layers, model.rope)

    def through_layer(self, stream: Stream, batch: StepBatch, state: State) -> Tensor:
        """See `MtpDrafter`."""
        x = rms_norm(stream.residual, self.layer.attention_norm, self.eps, self.target.dtype)
        return self.layer(x, stream, self.norm, Step.of(batch, state))
