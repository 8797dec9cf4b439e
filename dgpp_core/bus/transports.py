"""Which transport the ranks of a world take. Needs no torch."""

from __future__ import annotations

from typing import Literal

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.fabric import Fabric

Transport = Literal["shm", "verbs", "nccl", "gloo"]


def choose(fabric: Fabric, *, world: int, here: int, cuda: bool, shared: bool = False) -> Transport:
    """The transport of a world; rank 0 chooses, and tells the others.

    Args:
        fabric: rank 0's.
        here: ranks that were started on this host with rank 0, itself among them.
        cuda: the ranks compute on GPUs.
        shared: several of them on one, which NCCL does not take.

    Raises:
        ConfigError: what is wanted cannot carry tensors of this kind of device.
    """
    library: Transport = "nccl" if cuda else "gloo"
    if fabric.bus == "auto":
        if here == world:  # NCCL finds the links between the GPUs of a host; shared memory goes through the host's own
            return "nccl" if cuda and not shared else "shm"
        return "verbs" if fabric.devices else library
    if fabric.bus in ("nccl", "gloo") and fabric.bus != library:
        raise ConfigError(
            "the bus cannot carry tensors of this kind of device",
            where="--bus, DGPP_BUS",
            found=f"{fabric.bus}, tensors of a {'GPU' if cuda else 'CPU'}",
            expected=f"auto, shm, verbs or {library}",
        )
    return fabric.bus
