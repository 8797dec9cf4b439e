"""One RDMA device through pyverbs: a registered slab, and a reliable connection with each peer.

pyverbs comes with the distribution's rdma-core (``python3-pyverbs``) and fits only that. It is imported here, when a
rank opens its first device.
"""

from __future__ import annotations

import errno
import importlib
import resource
from typing import Any

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.slab import Slab
from dgpp_core.bus.verbs.ports import PORT, Rail

PSN = 0x1234
MOST_MTU = 5
"""4,096 bytes, as the verbs number them."""
TIMEOUT, RETRIES = 14, 6
"""67 ms for a first attempt and six more; 7 would mean for ever to Soft-RoCE."""
MTUS = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """What peers need to know of one device of a rank.

    Attributes:
        gid: as text.
        family: of the GID's address.
        mtu: of the port, as the verbs number them.
        key: with which peers write to the slab.
        address: of the slab, in the rank's own process.
        numbers: of the queue pairs, by peer; the rank's own place is 0.
    """

    device: str
    gid: str
    family: str
    mtu: int
    key: int
    address: int
    numbers: list[int]


def pyverbs(name: str) -> Any:
    """A module of pyverbs.

    Raises:
        EngineError: it is not there, or does not fit.
    """
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise EngineError(
            "pyverbs cannot be imported",
            where="verbs transport",
            found=str(error),
            expected="the one of the distribution, for this version of Python",
            hint="install python3-pyverbs and make it importable here",
        ) from error


def constants() -> Any:
    """The verbs' constants; their module was renamed."""
    try:
        return pyverbs("enums")
    except EngineError:
        return pyverbs("libibverbs_enums")


def locked_memory(device: str, size: int) -> EngineError:
    """The error of a slab of ``size`` bytes that cannot be registered for want of memory that may be locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return EngineError(
        "the limit of locked memory is too small for the bus",
        where=device,
        found=f"{soft} bytes",
        expected=f"{size} bytes for each device and pool",
        hint="raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1",
    )


def unwritten(device: str, peer: int, status: int, vendor: int) -> EngineError:
    """The error of a write that did not arrive."""
    return EngineError(
        f"rank {peer} cannot be written to",
        where=f"{device} to rank {peer}",
        found=f"completion status {status}, vendor {vendor}",
        expected="the write arrives",
        hint="12 means that the peer did not answer: see its log, cable and switch",
    )


class VerbsDevice:
    """A device, opened.

    Args:
        peers: ranks to connect with.
        depth: writes that may be on their way to one peer.

    Raises:
        EngineError: it cannot be opened, or the slab cannot be registered with it.
    """

    def __init__(self, rail: Rail, slab: Slab, world: int, peers: list[int], depth: int) -> None:
        self.rail, self._slab, self.depth = rail, slab, depth
        self._e = e = constants()
        qp, self._failure = pyverbs("qp"), pyverbs("pyverbs_error").PyverbsError
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        try:
            self._context = pyverbs("device").Context(name=rail.device)
            self._mtu = int(self._context.query_port(PORT).active_mtu)
            self._domain = pyverbs("pd").PD(self._context)
            self._region = pyverbs("mr").MR(self._domain, slab.geometry.size, access, address=slab.address)
            self._queue = pyverbs("cq").CQ(self._context, depth * max(len(peers), 1))
            room = qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            init = {"qp_type": e.IBV_QPT_RC, "scq": self._queue, "rcq": self._queue, "cap": room}
            self._pairs = {peer: qp.QP(self._domain, qp.QPInitAttr(**init)) for peer in peers}
        except self._failure as error:
            raise self._refused(error) from error
        self._lanes: dict[int, Lane] = {}
        self._peer_of = {pair.qp_num: peer for peer, pair in self._pairs.items()}
        numbers = [self._pairs[peer].qp_num if peer in self._pairs else 0 for peer in range(world)]
        self.lane = Lane(
            device=rail.device,
            gid=str(rail.gid.address.exploded),
            family=rail.gid.family,
            mtu=self._mtu,
            key=self._region.rkey,
            address=slab.address,
            numbers=numbers,
        )

    def connect(self, rank: int, peer: int, theirs: Lane) -> None:
        """Make this rank's connection with a peer ready for both directions.

        Raises:
            EngineError: the device refuses.
        """
        qp, addr, e = pyverbs("qp"), pyverbs("addr"), self._e
        route = addr.GlobalRoute(dgid=addr.GID(theirs.gid), sgid_index=self.rail.gid.index, hop_limit=255)
        attributes = qp.QPAttr()
        attributes.port_num, attributes.pkey_index = PORT, 0
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        attributes.dest_qp_num = theirs.numbers[rank]
        attributes.path_mtu = min(self._mtu, theirs.mtu, MOST_MTU)
        attributes.rq_psn = attributes.sq_psn = PSN
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 7
        attributes.timeout, attributes.retry_cnt = TIMEOUT, RETRIES
        attributes.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=PORT)
        try:
            self._pairs[peer].to_rts(attributes)
        except self._failure as error:
            what, where = "a connection cannot be made", f"{self.rail.device} to rank {peer}, {theirs.gid}"
            raise EngineError(what, where=where, found=str(error), hint="check addresses and routes") from error
        self._lanes[peer] = theirs

    def write(self, peer: int, source: int, target: int, size: int) -> None:
        """Begin to write ``size`` bytes of the slab into a peer's.

        Raises:
            EngineError: the device refuses.
        """
        e, wr, theirs = self._e, pyverbs("wr"), self._lanes[peer]
        place = wr.SGE(self._slab.address + source, size, self._region.lkey)
        request = wr.SendWR(peer, num_sge=1, sg=[place], opcode=e.IBV_WR_RDMA_WRITE, send_flags=e.IBV_SEND_SIGNALED)
        request.set_wr_rdma(theirs.key, theirs.address + target)
        try:
            self._pairs[peer].post_send(request)
        except self._failure as error:
            where = f"{self.rail.device} to rank {peer}"
            raise EngineError("a write cannot be posted", where=where, found=str(error)) from error

    def finished(self) -> list[int]:
        """The peers of writes that have arrived, one entry a write.

        Raises:
            EngineError: one did not arrive: the peer is gone, or the way to it.
        """
        _, completions = self._queue.poll(16)
        for completion in completions:
            if completion.status != self._e.IBV_WC_SUCCESS:
                peer = self._peer_of.get(completion.qp_num, completion.wr_id)
                raise unwritten(self.rail.device, peer, int(completion.status), completion.vendor_err)
        return [completion.wr_id for completion in completions]

    def close(self) -> None:
        """Close everything, connections first."""
        for pair in self._pairs.values():
            pair.close()
        for part in (self._queue, self._region, self._domain, self._context):
            part.close()

    def _refused(self, error: Any) -> EngineError:
        name = self.rail.device
        if getattr(error, "error_code", 0) == errno.ENOMEM or "Cannot allocate memory" in str(error):
            return locked_memory(name, self._slab.geometry.size)
        return EngineError("an RDMA device cannot be set up", where=name, found=str(error))
