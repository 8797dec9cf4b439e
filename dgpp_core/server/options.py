"""What the front end and its engine process are started with."""

from __future__ import annotations

import msgspec

from dgpp_core.api.spec import Dialect
from dgpp_core.api.vision import Vision
from dgpp_core.config.fabric import Fabric
from dgpp_core.config.settings import FileInputs, HttpSettings, ImageInputs


class SamplingOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults from the command line, which go before the checkpoint's own; None leaves a value alone."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class WorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that share a model.

    Attributes:
        size: how many.
        log_dir: where each leaves its fault file.
        rendezvous: ``host:port`` to listen at for ranks that are started elsewhere; empty starts them all here.
        epoch: counts the starts of this world; ranks that were started for another one are refused.
        fabric_port: where the bus meets; 0 takes any port that is free.
        timeout: seconds for the other ranks to join.
        fabric: how this host reaches them.
    """

    size: int
    log_dir: str
    rendezvous: str = ""
    epoch: int = 1
    fabric_port: int = 0
    timeout: float = 120.0
    fabric: Fabric = Fabric()

    @property
    def here(self) -> int:
        """Ranks on this host."""
        return 1 if self.rendezvous else self.size


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One engine and its HTTP service.

    Attributes:
        model: the spec's name, which tells the engine what to build.
        served_id: the model id that clients name.
        checkpoint: the checkpoint's folder.
        dialect: the family's markers and template; None where it has none.
        vision: how the model takes images; None where it takes none.
        config_eos: end ids of config.json.
        settings: the resolved `EngineSettings` as JSON, handed to the engine as they are.
        slots: requests that run at once.
        queue_limit: requests that wait for a slot before the next one gets a 503.
        max_connections: open HTTP connections.
        default_max_tokens: reply limit where a request names none.
        reasoning_in_content: reasoning stays in the text.
        no_eos: no reply ends by itself.
        http: where the service listens.
        files: limits on files in requests.
        images: limits on images in requests.
        device: the engine's device.
        image_cache: the folder of resident images; empty keeps none.
        sampling: sampling defaults from the command line.
        seed: the seed of requests that name none; None draws one for each.
        world: the ranks that share the model, where there are several.
    """

    model: str
    served_id: str
    checkpoint: str
    settings: bytes
    dialect: Dialect | None = None
    vision: Vision | None = None
    config_eos: tuple[int, ...] = ()
    slots: int = 8
    queue_limit: int = 64
    max_connections: int = 64
    default_max_tokens: int = 256
    reasoning_in_content: bool = False
    no_eos: bool = False
    http: HttpSettings = HttpSettings()
    files: FileInputs = FileInputs()
    images: ImageInputs = ImageInputs()
    device: str = "cpu"
    image_cache: str = ""
    sampling: SamplingOverrides = SamplingOverrides()
    seed: int | None = None
    world: WorldOptions | None = None
