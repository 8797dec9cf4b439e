/* One RDMA device, and the posting loop over one or two, without an interpreter. The structs that Python fills in are
 * declared a second time in dgpp_core/bus/verbs/native.py. A function that can fail returns 0, or an errno.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"

enum { MOST = 8, PORT = 1, BATCH = 16 };

struct device {
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_mr *region;
    struct ibv_cq *queue;
    struct ibv_qp *pairs[MOST];
    uint8_t *slab;
    uint64_t address[MOST]; /* of the peers' slabs, in their processes */
    uint32_t key[MOST];
    uint32_t flying[MOST]; /* signalled writes that have not arrived */
    uint32_t depth;
};

struct description {
    uint32_t mtu, key, numbers[MOST];
};

struct remote {
    uint64_t address;
    uint32_t peer, number, key, mtu, psn, index;
    uint32_t timeout, retries;
    uint8_t gid[16];
};

void dgpp_close(struct device *d)
{
    for (int peer = 0; peer < MOST; peer++)
        if (d->pairs[peer])
            ibv_destroy_qp(d->pairs[peer]);
    if (d->queue)
        ibv_destroy_cq(d->queue);
    if (d->region)
        ibv_dereg_mr(d->region);
    if (d->domain)
        ibv_dealloc_pd(d->domain);
    if (d->context)
        ibv_close_device(d->context);
    free(d);
}

static int open_named(struct device *d, const char *name)
{
    int count = 0;
    struct ibv_device **all = ibv_get_device_list(&count);

    for (int i = 0; all && i < count; i++)
        if (!strcmp(ibv_get_device_name(all[i]), name))
            d->context = ibv_open_device(all[i]);
    if (all)
        ibv_free_device_list(all);
    return d->context ? 0 : errno ? errno : ENODEV;
}

static int set_up(struct device *d, uint64_t size, uint32_t world, uint32_t rank)
{
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

    if (!(d->domain = ibv_alloc_pd(d->context)) || !(d->region = ibv_reg_mr(d->domain, d->slab, size, access)))
        return errno;
    if (!(d->queue = ibv_create_cq(d->context, (int)(d->depth * world), NULL, NULL, 0)))
        return errno;
    for (uint32_t peer = 0; peer < world; peer++) {
        struct ibv_qp_init_attr init = {.send_cq = d->queue, .recv_cq = d->queue, .qp_type = IBV_QPT_RC};
        init.cap = (struct ibv_qp_cap){.max_send_wr = d->depth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1};
        if (peer != rank && !(d->pairs[peer] = ibv_create_qp(d->domain, &init)))
            return errno;
    }
    return 0;
}

int dgpp_open(struct device **made, struct description *told, const char *name, uint8_t *slab, uint64_t size,
              uint32_t world, uint32_t rank, uint32_t depth)
{
    struct device *d = calloc(1, sizeof *d);
    struct ibv_port_attr port;
    int failed;

    errno = 0;
    if (!d || world > MOST)
        return d ? (free(d), EINVAL) : ENOMEM;
    d->slab = slab;
    d->depth = depth;
    if ((failed = open_named(d, name)) || (failed = set_up(d, size, world, rank)) ||
        (failed = ibv_query_port(d->context, PORT, &port))) {
        dgpp_close(d);
        return failed;
    }
    told->mtu = port.active_mtu;
    told->key = d->region->rkey;
    for (uint32_t peer = 0; peer < world; peer++)
        told->numbers[peer] = d->pairs[peer] ? d->pairs[peer]->qp_num : 0;
    *made = d;
    return 0;
}

int dgpp_connect(struct device *d, const struct remote *r)
{
    struct ibv_qp *pair = d->pairs[r->peer];
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = PORT, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    int failed = ibv_modify_qp(pair, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);

    if (failed)
        return failed;
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = (enum ibv_mtu)r->mtu;
    a.dest_qp_num = r->number;
    a.rq_psn = a.sq_psn = r->psn;
    a.max_dest_rd_atomic = a.max_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = PORT;
    a.ah_attr.grh.hop_limit = 255;
    a.ah_attr.grh.sgid_index = (uint8_t)r->index;
    memcpy(a.ah_attr.grh.dgid.raw, r->gid, sizeof r->gid);
    if ((failed = ibv_modify_qp(pair, &a,
                                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)))
        return failed;
    a.qp_state = IBV_QPS_RTS;
    a.timeout = (uint8_t)r->timeout;
    a.retry_cnt = (uint8_t)r->retries;
    a.rnr_retry = 7;
    if ((failed = ibv_modify_qp(pair, &a,
                                IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                    IBV_QP_MAX_QP_RD_ATOMIC)))
        return failed;
    d->address[r->peer] = r->address;
    d->key[r->peer] = r->key;
    return 0;
}

/* Begin one write, with a completion. */
int dgpp_write(struct device *d, uint32_t peer, uint64_t source, uint64_t target, uint32_t size, int signalled)
{
    struct ibv_sge place = {(uintptr_t)(d->slab + source), size, d->region->lkey};
    struct ibv_send_wr request = {.wr_id = peer, .sg_list = &place, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    int failed;

    request.send_flags = signalled ? IBV_SEND_SIGNALED : 0;
    request.wr.rdma.remote_addr = d->address[peer] + target;
    request.wr.rdma.rkey = d->key[peer];
    if (!(failed = ibv_post_send(d->pairs[peer], &request, &bad)) && signalled)
        d->flying[peer]++;
    return failed;
}

/* See what has arrived. Returns 0, or status | vendor << 8 | peer << 40 | 1 << 48 of a write that did not. */
uint64_t dgpp_reap(struct device *d)
{
    struct ibv_wc done[BATCH];
    const int count = ibv_poll_cq(d->queue, BATCH, done);

    for (int i = 0; i < count; i++) {
        uint64_t peer = done[i].wr_id;
        if (done[i].status != IBV_WC_SUCCESS)
            return done[i].status | (uint64_t)done[i].vendor_err << 8 | peer << 40 | 1ull << 48;
        d->flying[peer]--;
    }
    return 0;
}

/* Writes with a completion that have not arrived: those to a peer, or to all. */
uint32_t dgpp_flying(const struct device *d, int32_t peer)
{
    uint32_t sum = 0;
    for (int32_t i = 0; i < MOST; i++)
        sum += peer < 0 || i == peer ? d->flying[i] : 0;
    return sum;
}

struct loop {
    struct layout layout;
    uint8_t *slab;
    struct device *const *lanes;
    uint32_t *posted; /* a row: the generation that went out last */
    uint32_t *served; /* a row: to how many peers the one that is ready has gone */
    uint64_t *free;   /* a peer: when more may go to it, nanoseconds */
    uint64_t linger, nap, burst;
    double pace; /* nanoseconds a byte */
    uint64_t fault;
    uint32_t lane_count, failed_lane, stop;
};

static int send_one(struct loop *l, uint32_t lane, uint32_t peer, uint32_t channel, uint64_t word)
{
    struct device *d = l->lanes[lane];
    const uint64_t source = source_of(&l->layout, peer, channel, word), target = target_of(&l->layout, channel, word);
    const uint32_t size = (uint32_t)padded(&l->layout, l->slab + source);
    int failed = size ? dgpp_write(d, peer, source + HEADER, target + HEADER, size, 0) : 0;

    if (!failed)
        failed = dgpp_write(d, peer, source, target, HEADER, 1);
    if (l->pace > 0) {
        const uint64_t t = now(), early = (uint64_t)(l->pace * (double)l->burst), from = t > early ? t - early : 0;
        l->free[peer] = (l->free[peer] > from ? l->free[peer] : from) + (uint64_t)(l->pace * size);
    }
    return failed;
}

/* Send what is ready and due; how many messages there were. Sets fault where something failed. */
uint32_t dgpp_advance(struct loop *l)
{
    const struct layout *y = &l->layout;
    uint32_t sent = 0;

    for (uint32_t lane = 0; lane < l->lane_count; lane++)
        if (!l->fault && dgpp_flying(l->lanes[lane], -1) && (l->fault = dgpp_reap(l->lanes[lane])))
            l->failed_lane = lane;
    for (uint32_t row = 0; row < 2 * y->channels && !l->fault; row++) {
        const uint64_t word = ready_of(l->slab, row);
        const uint32_t channel = row / 2, lane = channel % l->lane_count;
        if ((uint32_t)word == l->posted[row])
            continue;
        while (l->served[row] < y->world - 1 && !l->fault) {
            const uint32_t peer = (y->rank + 1 + l->served[row]) % y->world;
            if ((l->pace > 0 && now() < l->free[peer]) || 2 * dgpp_flying(l->lanes[lane], (int32_t)peer) + 2 > l->lanes[lane]->depth)
                break;
            const int failed = send_one(l, lane, peer, channel, word);
            if (failed) {
                l->fault = (uint64_t)peer << 40 | 1ull << 49 | (uint64_t)failed;
                l->failed_lane = lane;
            }
            l->served[row]++;
            sent++;
        }
        if (l->served[row] == y->world - 1) {
            l->served[row] = 0;
            l->posted[row] = (uint32_t)word;
        }
    }
    return sent;
}

/* Whether all that is ready was given to the devices, for every peer. */
int dgpp_posted(const struct loop *l)
{
    return all_posted(&l->layout, l->slab, l->posted);
}

/* Whether all that was ready has arrived. */
int dgpp_idle(const struct loop *l)
{
    if (!dgpp_posted(l))
        return 0;
    for (uint32_t lane = 0; lane < l->lane_count; lane++)
        if (dgpp_flying(l->lanes[lane], -1))
            return 0;
    return 1;
}

/* Until stop is set, or something failed. */
void dgpp_run(struct loop *l)
{
    const struct timespec nap = {0, (long)l->nap};
    uint64_t busy = now();

    while (!__atomic_load_n(&l->stop, __ATOMIC_ACQUIRE) && !l->fault) {
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
