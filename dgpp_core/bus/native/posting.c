/* The posting loop of shared memory without an interpreter. The struct is declared a second time in
 * dgpp_core/bus/native/__init__.py.
 */
#include <string.h>

#include "layout.h"

struct loop {
    struct layout layout;
    uint8_t *slab;         /* this rank's */
    uint8_t *const *peers; /* every rank's as mapped here, in order of rank */
    uint32_t *posted;      /* a row: the generation that went out last */
    uint64_t linger;       /* nanoseconds of spinning after a message */
    uint64_t nap;          /* nanoseconds */
    uint32_t stop;
};

static void post(const struct loop *l, uint32_t peer, uint32_t channel, uint64_t word)
{
    const uint8_t *source = l->slab + source_of(&l->layout, peer, channel, word);
    uint8_t *target = l->peers[peer] + target_of(&l->layout, channel, word);

    memcpy(target + HEADER, source + HEADER, padded(&l->layout, source));
    memcpy(target + 4, source + 4, HEADER - 4);
    __atomic_store_n((uint32_t *)target, (uint32_t)word, __ATOMIC_RELEASE);
}

/* Send what is ready; how many messages there were. */
uint32_t dgpp_advance(struct loop *l)
{
    const struct layout *y = &l->layout;
    uint32_t sent = 0;

    for (uint32_t row = 0; row < 2 * y->channels; row++) {
        const uint64_t word = ready_of(l->slab, row);
        if ((uint32_t)word == l->posted[row])
            continue;
        for (uint32_t step = 1; step < y->world; step++, sent++)
            post(l, (y->rank + step) % y->world, row / 2, word);
        l->posted[row] = (uint32_t)word;
    }
    return sent;
}

/* Whether all that is ready has gone out. */
int dgpp_posted(const struct loop *l)
{
    return all_posted(&l->layout, l->slab, l->posted);
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
