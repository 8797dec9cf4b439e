"""Collectives at the sizes of decoding, among all nodes: ``python -m dgpp_core.launch.exchange OPTIONS`` on each.

Every sum is compared with its right value. Rank 0 prints the times as one line of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from dgpp_core.api import Bus, EngineError
from dgpp_core.launch.exchange_terms import SIZES, ExchangeOptions, Timing

WARM, TIMES = 5, 40
START_S = 60.0


def measure(bus: Bus, clock: Callable[[], float], sizes: Sequence[int] = SIZES) -> list[Timing]:
    """Time all-reduces of bfloat16.

    Raises:
        EngineError: a sum is wrong, or a collective fails.
    """
    found = []
    for size in sizes:
        part = torch.arange(size // 2).remainder(8).add(bus.rank + 1).to(torch.bfloat16)
        right = torch.arange(size // 2).remainder(8).mul(bus.world).add(bus.world * (bus.world + 1) // 2)
        times = []
        for turn in range(WARM + TIMES):
            began = clock()
            total = bus.all_reduce(part)
            if turn >= WARM:
                times.append((clock() - began) * 1e6)
            if not torch.equal(total, right.to(torch.bfloat16)):
                wrong = int((total != right.to(torch.bfloat16)).sum())
                raise EngineError(
                    "a sum over all nodes is wrong", where=f"rank {bus.rank}, {size} bytes",
                    found=f"{wrong} of {size // 2} values differ", hint="suspect the network card or its memory",
                )  # fmt: skip
        times.sort()
        found.append(Timing(bytes=size, median=times[len(times) // 2], worst=times[-1]))
    return found


def main(argv: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> int:
    """Entry point: the options as one JSON argument."""
    options = msgspec.json.decode(argv[0], type=ExchangeOptions)
    torch.set_num_threads(1)
    if options.transport == "verbs":
        from dgpp_core.bus.forming import Terms
        from dgpp_core.bus.verbs.join import join

        terms = Terms(rank=options.rank, world=options.world, address=options.rendezvous, timeout=START_S)
        with join(terms, devices=options.devices, gid_indices=options.gid_indices) as bus:
            found = measure(bus, clock)
    else:
        from dgpp_core.bus.distributed import join as join_tcp

        with join_tcp(options.rank, options.world, options.rendezvous, timeout=START_S) as bus:
            found = measure(bus, clock)
    if options.rank == 0:
        print(msgspec.json.encode(found).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
