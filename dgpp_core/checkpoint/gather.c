/* Rows of a table that lies in files, read where a stream of a GPU comes by: a host function may call neither the
 * interpreter nor the driver. The structs are declared a second time in dgpp_core/checkpoint/gather.py.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

struct run {
    int64_t first;  /* row of the table */
    int64_t offset; /* byte of the file at which it lies; the others follow */
    int32_t file;
    int32_t pad;
};

struct gather {
    const struct run *runs; /* in ascending order of their first rows */
    int64_t count;          /* of runs */
    int64_t rows;           /* of the table */
    int64_t width;          /* bytes of a row */
    const int64_t *wanted;  /* how many, and their numbers */
    uint8_t *out;
    int64_t fault; /* of the first row that could not be read: an errno, SHORT or NO_ROW */
    int64_t row;   /* which one */
};

enum { SHORT = -1, NO_ROW = -2 };

static const struct run *run_of(const struct gather *g, int64_t row)
{
    int64_t low = 0, high = g->count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (g->runs[middle].first <= row)
            low = middle;
        else
            high = middle;
    }
    return &g->runs[low];
}

static int64_t read_row(const struct gather *g, int64_t row, uint8_t *place)
{
    if (row < 0 || row >= g->rows)
        return NO_ROW;
    const struct run *run = run_of(g, row);
    int64_t at = run->offset + (row - run->first) * g->width, got = 0;
    while (got < g->width) {
        ssize_t more = pread(run->file, place + got, g->width - got, at + got);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            return more < 0 ? errno : SHORT;
        got += more;
    }
    return 0;
}

/* All rows are asked for before the first is waited for, so that a disk serves them side by side. What cannot be read
 * is zero, and the host hears of it before it uses a result.
 */
void dgpp_gather(void *argument)
{
    struct gather *g = argument;
    int64_t count = g->wanted[0];
    const int64_t *rows = g->wanted + 1;
    for (int64_t i = 0; i < count; i++)
        if (rows[i] >= 0 && rows[i] < g->rows) {
            const struct run *run = run_of(g, rows[i]);
            posix_fadvise(run->file, run->offset + (rows[i] - run->first) * g->width, g->width, POSIX_FADV_WILLNEED);
        }
    for (int64_t i = 0; i < count; i++) {
        int64_t fault = read_row(g, rows[i], g->out + i * g->width);
        if (!fault)
            continue;
        memset(g->out + i * g->width, 0, g->width);
        if (!g->fault) {
            g->row = rows[i];
            __atomic_store_n(&g->fault, fault, __ATOMIC_RELEASE);
        }
    }
}
