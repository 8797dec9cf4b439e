/* The posting loop of shared memory without an interpreter. The layout is that of dgpp_core/bus/slab.py; the struct is
 * declared a second time in dgpp_core/bus/native/__init__.py.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { HEADER = 64, CONTROL = 4096, READY = 128, SIZE = 4, SPINS = 256 };

struct loop {
    uint8_t *slab;         /* this rank's */
    uint8_t *const *peers; /* every rank's as mapped here, in order of rank */
    uint32_t *posted;      /* a channel: the generation that went out last */
    uint64_t slot_bytes;
    uint64_t linger; /* nanoseconds of spinning after a message */
    uint64_t nap;    /* nanoseconds */
    uint32_t world, rank, channels;
    uint32_t stop;
};

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void post(const struct loop *l, uint32_t peer, uint32_t channel, uint32_t generation, uint32_t stride)
{
    const uint64_t message = HEADER + l->slot_bytes, turn = channel * 2ull + (generation & 1);
    const uint8_t *source = l->slab + CONTROL + turn * l->world * message + (uint64_t)stride * peer;
    const uint64_t slots = CONTROL + 2ull * l->channels * l->world * message;
    uint8_t *target = l->peers[peer] + slots + (l->rank * 2ull * l->channels + turn) * message;
    uint32_t size;

    memcpy(&size, source + SIZE, sizeof size);
    if (size <= l->slot_bytes)
        memcpy(target + HEADER, source + HEADER, ((uint64_t)size + 3) / 4 * 4);
    memcpy(target + 4, source + 4, HEADER - 4);
    __atomic_store_n((uint32_t *)target, generation, __ATOMIC_RELEASE);
}

/* Send what is ready; how many messages there were. */
uint32_t dgpp_advance(struct loop *l)
{
    const uint64_t *ready = (const uint64_t *)(l->slab + READY);
    uint32_t sent = 0;

    for (uint32_t channel = 0; channel < l->channels; channel++) {
        const uint64_t word = __atomic_load_n(&ready[channel], __ATOMIC_ACQUIRE);
        if ((uint32_t)word == l->posted[channel])
            continue;
        for (uint32_t step = 1; step < l->world; step++, sent++)
            post(l, (l->rank + step) % l->world, channel, (uint32_t)word, (uint32_t)(word >> 32));
        l->posted[channel] = (uint32_t)word;
    }
    return sent;
}

/* Until stop is set. */
void dgpp_run(struct loop *l)
{
    const struct timespec nap = {0, (long)l->nap};
    uint64_t busy = now();

    while (!__atomic_load_n(&l->stop, __ATOMIC_ACQUIRE)) {
        uint32_t sent = 0;
        for (int spin = 0; spin < SPINS; spin++)
            sent |= dgpp_advance(l);
        const uint64_t t = now();
        if (sent)
            busy = t;
        else if (t - busy > l->linger)
            nanosleep(&nap, NULL);
    }
}
