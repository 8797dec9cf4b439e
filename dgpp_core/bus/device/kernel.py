"""The collective as a kernel: stage, tell the posting loop, wait for the peers, check the seals, fold.

One block a channel; blocks know nothing of each other. A launch's generation comes from a counter on the device, so
that a replayed graph needs nothing from the host. The layout is that of `dgpp_core.bus.slab`, in words of 32 bits.

What is polled or read from a slab was written by another processor or a network card: all of it is loaded at system
scope, and taken only when its seal fits. Only the lanes of the first warp poll, one a peer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dgpp_core.bus.slab import ABORT as _ABORT
from dgpp_core.bus.slab import CONTROL as _CONTROL
from dgpp_core.bus.slab import FAULT as _FAULT
from dgpp_core.bus.slab import HEADER as _HEADER
from dgpp_core.bus.slab import READY as _READY

ABORT: tl.constexpr = tl.constexpr(_ABORT // 4)
CONTROL: tl.constexpr = tl.constexpr(_CONTROL // 4)
FAULT: tl.constexpr = tl.constexpr(_FAULT // 4)
HEADER: tl.constexpr = tl.constexpr(_HEADER // 4)
READY: tl.constexpr = tl.constexpr(_READY // 4)
FACTOR: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
TRIES: tl.constexpr = tl.constexpr(20000)
"""Readings of a message whose generation is there; each takes a microsecond or more."""
SILENT, ABORTED, DAMAGED = 1, 2, 3
"""Codes in the top byte of the fault word; below them 8 bits of ranks, the channel and the generation."""
_DAMAGED: tl.constexpr = tl.constexpr(DAMAGED)


@triton.jit
def _arrived(cell, generation, bit, abort, limit):
    """0 once ``cell`` holds ``generation``, and at once where ``bit`` is 0; 1 after ``limit`` ns; 2 when aborted."""
    return tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .b32 value, spins, status;
            .reg .b64 begun, now;
            mov.b32 status, 0;
            setp.eq.b32 p, $3, 0;
            @p bra LEFT;
            mov.u64 begun, %globaltimer;
            mov.b32 spins, 0;
        AGAIN:
            ld.acquire.sys.global.b32 value, [$1];
            setp.eq.b32 p, value, $2;
            @p bra LEFT;
            add.u32 spins, spins, 1;
            and.b32 value, spins, 63;
            setp.ne.b32 p, value, 0;
            @p bra AGAIN;
            ld.relaxed.sys.global.b32 value, [$4];
            and.b32 value, value, $3;
            mov.b32 status, 2;
            setp.ne.b32 p, value, 0;
            @p bra LEFT;
            mov.b32 status, 0;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, begun;
            setp.lt.u64 p, now, $5;
            @p bra AGAIN;
            mov.b32 status, 1;
        LEFT:
            mov.b32 $0, status;
        }""",
        "=r,l,r,r,l,l",
        [cell, generation, bit, abort, limit],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _publish(address, value):
    """Store 64 bits for the host, after everything that the block stored before; by one thread."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 p, thread, 0;
            @p st.release.sys.global.b64 [$1], $2;
            mov.b32 $0, thread;
        }""",
        "=r,l,l",
        [address, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _hashed(word, position, source):
    """One word's term of `dgpp_core.bus.slab.seal`."""
    first = (source.to(tl.uint64) << 32) + 1
    return (word.to(tl.uint32, bitcast=True).to(tl.uint64) + position + first) * FACTOR


@triton.jit
def _widened(word, KIND: tl.constexpr):
    """The numbers of a word as float32: those of the lower and of the upper half, or the same one twice."""
    if KIND == "float32":
        low = word.to(tl.float32, bitcast=True)
        high = low
    else:
        lower = (word & 0xFFFF).to(tl.uint16)
        upper = ((word >> 16) & 0xFFFF).to(tl.uint16)
        if KIND == "bfloat16":
            low = lower.to(tl.bfloat16, bitcast=True).to(tl.float32)
            high = upper.to(tl.bfloat16, bitcast=True).to(tl.float32)
        else:
            low = lower.to(tl.float16, bitcast=True).to(tl.float32)
            high = upper.to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _narrowed(low, high, KIND: tl.constexpr):
    """Back into words, rounded once."""
    if KIND == "float32":
        word = low.to(tl.int32, bitcast=True)
    else:
        if KIND == "bfloat16":
            lower = low.to(tl.bfloat16).to(tl.uint16, bitcast=True)
            upper = high.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        else:
            lower = low.to(tl.float16).to(tl.uint16, bitcast=True)
            upper = high.to(tl.float16).to(tl.uint16, bitcast=True)
        word = (lower.to(tl.uint32) | (upper.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)
    return word


@triton.jit
def _send(x, message, first, words, generation, tag, RANK: tl.constexpr, SLOT: tl.constexpr):
    """Write the message with the words from ``first`` on."""
    i = tl.arange(0, SLOT)
    there = first + i < words
    word = tl.load(x + first + i, mask=there, other=0)
    tl.store(message + HEADER + i, word, mask=there)
    source = tl.full([], RANK, tl.int32)
    size = tl.minimum(tl.maximum(words - first, 0), SLOT) * 4
    sealed = tl.xor_sum(tl.where(there, _hashed(word, i.to(tl.uint64) + 3, source), 0), 0)
    sealed ^= _hashed(generation, 0, source) ^ _hashed(size, 1, source) ^ _hashed(tag, 2, source)
    tl.store(message + 1, size)
    tl.store(message + 2, tag)
    tl.store((message + 4).to(tl.pointer_type(tl.uint64)), sealed)
    tl.store(message, generation)


@triton.jit(do_not_specialize=["tag", "limit"])
def exchange(
    x,
    out,
    slab,
    state,
    words,
    tag,
    limit,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOT: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
    REDUCE: tl.constexpr,
    STRIPED: tl.constexpr,
):
    """Grid (channels in use,), LANES threads: one collective of up to that many slots.

    Block c has words [c * SLOT, (c + 1) * SLOT) of ``x``; STRIPED, the ranks have such stretches in turn, and rank r's
    of block c begins at (c * WORLD + r) * SLOT.

    REDUCE: ``out`` gets the fold of what this block has; STRIPED, of this rank's stretch alone, which each peer sends.
    Else: ``out`` gets every rank's words, each ``words`` after the last rank's; STRIPED, every rank's stretch in its
    place.

    Args:
        x: int32, ``words`` of them.
        out: int32.
        slab: int32, pinned host memory.
        state: int32 ``[CHANNELS + 1]``: the generation of each channel, and whether a kernel gave up.
        limit: nanoseconds to wait for a peer.
    """
    MESSAGE: tl.constexpr = HEADER + SLOT
    SLOTS: tl.constexpr = CONTROL + CHANNELS * 2 * WORLD * MESSAGE
    STEP: tl.constexpr = WORLD if STRIPED else 1
    SPREAD: tl.constexpr = 1 if STRIPED else 0
    channel = tl.program_id(0)
    i = tl.arange(0, SLOT)
    lane = tl.arange(0, LANES)
    if tl.max(tl.load(state + CHANNELS + lane * 0), 0) == 0:  # over lanes: another block may give up just now
        generation = tl.load(state + channel) + 1
        turn = channel * 2 + (generation & 1)
        base = channel * STEP * SLOT
        mine = base + SPREAD * RANK * SLOT

        row = slab + CONTROL + turn * (WORLD * MESSAGE)
        if STRIPED and REDUCE:
            for peer in tl.static_range(WORLD):
                if peer != RANK:
                    _send(x, row + peer * MESSAGE, base + peer * SLOT, words, generation, tag, RANK, SLOT)
            stride = tl.full([], MESSAGE * 4, tl.uint64)
        else:
            _send(x, row, mine, words, generation, tag, RANK, SLOT)
            stride = tl.full([], 0, tl.uint64)
        ready = (slab + READY + 2 * turn).to(tl.int64)
        _publish(ready, (stride << 32) | generation.to(tl.uint32, bitcast=True).to(tl.uint64))

        peers = (lane < WORLD) & (lane != RANK)
        bit = tl.where(peers, 1 << (lane & 31), 0)
        cells = slab + SLOTS + (lane * (CHANNELS * 2) + turn) * MESSAGE
        status = _arrived(cells.to(tl.int64), generation, bit, (slab + ABORT).to(tl.int64), limit)
        code = tl.max(status, 0)
        missing = tl.sum(tl.where(status != 0, bit, 0), 0)

        begins = mine if REDUCE else base + SPREAD * lane * SLOT
        size = tl.minimum(tl.maximum(words - begins, 0), SLOT) * 4
        headers = _hashed(generation, 0, lane) ^ _hashed(size + lane * 0, 1, lane) ^ _hashed(tag, 2, lane)
        tries = 0
        while (code == 0) & (tries < TRIES):
            seals = tl.load((cells + 4).to(tl.pointer_type(tl.uint64)), mask=peers, other=0, volatile=True)
            wrong = tl.xor_sum(tl.where(peers, headers ^ seals, 0), 0)
            hashes = tl.zeros([SLOT], tl.uint64)
            low = tl.zeros([SLOT], tl.float32)
            high = tl.zeros([SLOT], tl.float32)
            for source in tl.static_range(WORLD):
                index = mine + i
                if not REDUCE:
                    index = base + SPREAD * source * SLOT + i
                there = index < words
                if source == RANK:
                    word = tl.load(x + index, mask=there, other=0)
                else:
                    slot = slab + SLOTS + (source * (CHANNELS * 2) + turn) * MESSAGE + HEADER
                    word = tl.load(slot + i, mask=there, other=0, volatile=True)
                    term = _hashed(word, i.to(tl.uint64) + 3, tl.full([], source, tl.int32))
                    hashes ^= tl.where(there, term, 0)
                if REDUCE:
                    more_low, more_high = _widened(word, KIND)
                    low = more_low if source == 0 else low + more_low
                    high = more_high if source == 0 else high + more_high
                else:
                    row_of = 0 if STRIPED else source
                    tl.store(out + words.to(tl.int64) * row_of + index, word, mask=there)
            if REDUCE:
                tl.store(out + mine + i, _narrowed(low, high, KIND), mask=mine + i < words)
            wrong ^= tl.xor_sum(hashes, 0)
            tries = tl.where(wrong == 0, TRIES + 1, tries + 1)
        if tries == TRIES:
            code = _DAMAGED
        tl.store(state + channel, generation)
        if code != 0:
            tl.store(state + CHANNELS, 1)
            fault = (code << 24) | (missing << 16) | channel
            word = (fault.to(tl.uint64) << 32) | generation.to(tl.uint32, bitcast=True).to(tl.uint64)
            _publish((slab + FAULT).to(tl.int64), word)
