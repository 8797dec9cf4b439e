"""The draft layer of GLM-5.3-Flash."""

from __future__ import annotations

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.norm import rms_norm
from dgpp_glm.drafter import MtpDrafter
from dgpp_glm.glm53_flash.config import FlashConfig
from dgpp_glm.glm53_flash.mixers import latent_attention
from dgpp_glm.glm53_flash.model import FlashModel
from dgpp_glm.latent import Layer, Step


class FlashDrafter(MtpDrafter):
    """A decoder layer of latent attention with one residual stream, and with latents and index keys of its own.

    It chooses its keys anew at each depth, as `dgpp_glm.glm53.drafter.Glm53Drafter` does.
    """

    def __init__(self, config: FlashConfig, shard: Shard, model: FlashModel, depth: int) -> None:
        super().__init__(config, shard, model, depth)
        index = config.num_hidden_layers
        self.layer = Layer(config, shard, index, latent_attention(config, shard, index))

    def through_layer(self, stream: Stream, batch: StepBatch, state: State) -> Tensor:
        """See `MtpDrafter`."""
        x = rms_norm(stream.residual, self.layer.attention_norm, self.eps, self.target.dtype)
        return self.layer(x, stream, self.norm, Step.of(batch, state), ())[0]
