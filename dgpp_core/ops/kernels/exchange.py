"""The binaries of the bus's kernel, `dgpp_core.bus.device.kernel`: stated here, where those of all others are."""

from __future__ import annotations

import torch

from dgpp_core.bus.device.kernel import exchange
from dgpp_core.bus.device.launch import meta_of
from dgpp_core.bus.slab import Geometry
from dgpp_core.ops.kernels.cases import CompileCase


def compile_cases() -> list[CompileCase]:
    """Both worlds that deployments have, sums of what models send, gathers of any bytes, and the long forms.

    A few scalars that are wanted only at the end may be kept on the stack.
    """
    cases = []
    for world in (2, 4):
        geometry = Geometry(world=world, channels=16, slot_bytes=16384)
        for kind, reduce, striped in (
            (torch.bfloat16, True, False),
            (torch.float32, True, False),
            (torch.float16, True, False),
            (torch.bfloat16, False, False),
            (torch.bfloat16, True, True),
            (torch.bfloat16, False, True),
        ):
            meta = meta_of(geometry, 1, kind, reduce=reduce, striped=striped)
            form = f"{'striped ' if striped else ''}{'sum' if reduce else 'gather'}"
            args = (*(torch.int32,) * 4, 12288, 7, 1 << 31)
            cases.append(CompileCase(f"exchange {form} {meta['KIND']}, {world} ranks", exchange, args, meta, stack=16))
    return cases
