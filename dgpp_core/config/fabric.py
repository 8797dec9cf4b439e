"""How the ranks of a world reach each other, as far as a site or a command line says."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Wanted = Literal["auto", "shm", "verbs", "nccl", "gloo"]
"""A transport: shared memory of one host, RDMA, torch.distributed for tensors of GPUs or of CPUs, or whatever fits."""
WANTED: tuple[Wanted, ...] = get_args(Wanted)


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """A node's way to the others.

    Attributes:
        bus: the transport; rank 0's counts. ``auto`` is shared memory where all ranks were started on one host, else
            RDMA where its devices are named, else torch.distributed.
        devices: names of this node's RDMA devices, in an order that is the same on every node; none is all active ones.
        gid_indices: of their addresses, one each; none chooses them.
    """

    bus: Wanted = "auto"
    devices: tuple[str, ...] = ()
    gid_indices: tuple[int, ...] = ()
