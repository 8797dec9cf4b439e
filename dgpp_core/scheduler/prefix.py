"""The prefix index: which full blocks hold which tokens, and which positions have a snapshot.

A node stands for "the tokens on the path to here have been processed". It is found by its parent and its block's exact
token ids. It owns its block; requests that use it are counted. A request that uses a node uses all nodes above it, so a
node nobody uses has no used node below it, and every unused node can be evicted, deepest first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict

from dgpp_core.scheduler.blocks import BlockPool

EVICTED_KEPT = 256


class Node:
    """One full block of a known prefix; without a parent once it is evicted. ``lost``: its snapshot was given up."""

    __slots__ = ("arena", "block", "children", "key", "lost", "parent", "users")

    def __init__(self, parent: Node | None, key: bytes, block: int) -> None:
        self.parent, self.key, self.block = parent, key, block
        self.children: dict[bytes, Node] = {}
        self.users = 0
        self.arena, self.lost = -1, False


class PrefixIndex:
    """Nodes, the snapshots that belong to them, and the order in which both are given up.

    ``_idle`` holds the unused nodes, least recently used first; a node is always put behind those below it, so that
    the first one is a leaf. ``_snapshots`` holds the nodes with a snapshot in the same order.
    """

    def __init__(self, pool: BlockPool, block_tokens: int, arenas: int, needs_snapshot: bool) -> None:
        self._pool, self._block_tokens, self._needs_snapshot = pool, block_tokens, needs_snapshot
        self._root = Node(None, b"", 0)
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._snapshots: OrderedDict[Node, None] = OrderedDict()
        self._free_arenas = list(range(arenas - 1, -1, -1))
        self._arenas = arenas
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self.size = 0
        self.evictions = 0

    @property
    def idle(self) -> int:
        """Blocks that eviction could free."""
        return len(self._idle)

    @property
    def arenas_in_use(self) -> int:
        """Arena slots that hold a snapshot, those of unfinished prompts included."""
        return self._arenas - len(self._free_arenas)

    def key(self, ids: array[int], at: int) -> bytes:
        """The token ids of block ``at``, as a node is found by."""
        return ids[at * self._block_tokens : (at + 1) * self._block_tokens].tobytes()

    def match(self, ids: array[int], tokens: int, chain: list[Node]) -> None:
        """Make ``chain`` the longest known chain of full blocks within the first ``tokens`` ids.

        ``chain`` is what an earlier call for the same ids made of it, or empty: only what changed since costs time.
        """
        while chain and chain[-1].parent is None:
            chain.pop()
        node = chain[-1] if chain else self._root
        for at in range(len(chain), tokens // self._block_tokens):
            child = node.children.get(self.key(ids, at))
            if child is None:
                break
            chain.append(child)
            node = child

    def usable(self, chain: list[Node]) -> list[Node]:
        """The part of a chain that every state group can serve: up to its deepest snapshot where one is needed."""
        if not self._needs_snapshot:
            return chain
        deepest = next((at for at in range(len(chain), 0, -1) if chain[at - 1].arena >= 0), 0)
        return chain[:deepest]

    def was_evicted(self, ids: array[int]) -> bool:
        """Whether the first block of ``ids`` was known lately; for messages only."""
        return self.key(ids, 0) in self._gone

    def idle_in(self, chain: list[Node]) -> int:
        """Nodes of a chain that no request uses: they are the last ones."""
        return len(chain) - bisect_left(chain, True, key=lambda node: node.users == 0)

    def attach(self, chain: list[Node]) -> None:
        """One more request uses these nodes."""
        for node in chain:
            node.users += 1
            self._idle.pop(node, None)
        if chain and chain[-1] in self._snapshots:
            self._snapshots.move_to_end(chain[-1])

    def adopt(self, ids: array[int], blocks: list[int], chain: list[Node], count: int) -> None:
        """Make nodes of a running request's own blocks ``len(chain) .. count``; ``chain`` grows.

        Stops where another request's block already stands for the same tokens: nothing in use may hang below a node
        that is not.
        """
        for at in range(len(chain), count):
            parent, key = chain[-1] if chain else self._root, self.key(ids, at)
            if key in parent.children:
                return
            node = self._add(parent, key, blocks[at])
            node.users = 1
            chain.append(node)

    def leave(self, ids: array[int], blocks: list[int], chain: list[Node], count: int) -> list[Node]:
        """A request lets go of its nodes and leaves its full blocks ``len(chain) .. count`` to the index.

        Blocks whose tokens are known already, and those past ``count``, are freed.

        Returns:
            the nodes of blocks ``0 .. max(len(chain), count)``.
        """
        path = list(chain)
        for at in range(len(chain), count):
            parent, key = path[-1] if path else self._root, self.key(ids, at)
            node = parent.children.get(key)
            if node is None:
                node = self._add(parent, key, blocks[at])
            else:
                self._pool.give((blocks[at],))
            path.append(node)
        self._pool.give(blocks[len(path) :])
        for node in chain:
            node.users -= 1
        for node in reversed(path):
            if node.users == 0:
                self._idle[node] = None
                self._idle.move_to_end(node)
        return path

    def reclaim(self, blocks: int) -> bool:
        """Evict until ``blocks`` blocks are free; False, and nothing is evicted, where that cannot be reached."""
        if self._pool.free + len(self._idle) < blocks:
            return False
        while self._pool.free < blocks:
            self._evict(self._idle.popitem(last=False)[0])
        return True

    def take_arena(self) -> int:
        """An arena slot for a new snapshot, giving up the least recently used one; -1 where there is none."""
        if not self._free_arenas:
            if not self._snapshots:
                return -1
            self._drop_snapshot(next(iter(self._snapshots)))
        return self._free_arenas.pop()

    def give_arena(self, arena: int) -> None:
        """Free an arena slot that belongs to no node."""
        self._free_arenas.append(arena)

    def pin_snapshot(self, node: Node, arena: int) -> None:
        """The snapshot in ``arena`` is the state at ``node``; a second one of the same state is freed."""
        if node.arena >= 0:
            self.give_arena(arena)
        else:
            node.arena, node.lost = arena, False
            self._snapshots[node] = None
        self._snapshots.move_to_end(node)

    def _add(self, parent: Node, key: bytes, block: int) -> Node:
        node = parent.children[key] = Node(parent, key, block)
        self.size += 1
        return node

    def _evict(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        if parent is self._root:
            self._gone[node.key] = None
            self._gone.move_to_end(node.key)
            if len(self._gone) > EVICTED_KEPT:
                self._gone.popitem(last=False)
        del parent.children[node.key]
        node.parent = None
        if node.arena >= 0:
            self._drop_snapshot(node)
        self._pool.give((node.block,))
        self.size -= 1
        self.evictions += 1

    def _drop_snapshot(self, node: Node) -> None:
        del self._snapshots[node]
        self._free_arenas.append(node.arena)
        node.arena, node.lost = -1, True
