/* The layout of dgpp_core/bus/slab.py. */
#ifndef DGPP_LAYOUT_H
#define DGPP_LAYOUT_H
#include <stdint.h>
#include <time.h>

enum { HEADER = 64, CONTROL = 4096, READY = 128, SIZE = 4, SPINS = 256 };

struct layout {
    uint64_t slot_bytes;
    uint32_t world, rank, channels;
    uint32_t pad;
};

static inline uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t turn_of(uint32_t channel, uint32_t generation)
{
    return channel * 2ull + (generation & 1);
}

/* Offset of what this rank sends. */
static inline uint64_t source_of(const struct layout *l, uint32_t peer, uint32_t channel, uint64_t word)
{
    return CONTROL + turn_of(channel, (uint32_t)word) * l->world * (HEADER + l->slot_bytes) + (word >> 32) * peer;
}

/* Offset of where it arrives in a peer's slab. */
static inline uint64_t target_of(const struct layout *l, uint32_t channel, uint64_t word)
{
    const uint64_t rows = 2ull * l->channels * l->world;
    return CONTROL + (rows + l->rank * 2ull * l->channels + turn_of(channel, (uint32_t)word)) * (HEADER + l->slot_bytes);
}

/* Of a row: of a channel and a turn. */
static inline uint64_t ready_of(const uint8_t *slab, uint32_t row)
{
    return __atomic_load_n((const uint64_t *)(slab + READY) + row, __ATOMIC_ACQUIRE);
}

/* Whether every row that is ready has gone out, given the generations that went out last. */
static inline int all_posted(const struct layout *l, const uint8_t *slab, const uint32_t *posted)
{
    for (uint32_t row = 0; row < 2 * l->channels; row++)
        if ((uint32_t)ready_of(slab, row) != posted[row])
            return 0;
    return 1;
}

/* Bytes of a payload that go out. */
static inline uint64_t padded(const struct layout *l, const uint8_t *header)
{
    const uint64_t size = *(const uint32_t *)(header + SIZE);
    return size <= l->slot_bytes ? (size + 3) / 4 * 4 : 0;
}
#endif
