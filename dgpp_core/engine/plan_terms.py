"""The terms of the memory plan: weights, state groups, scratch. Pure arithmetic, torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from dgpp_core.api import DTYPE_BYTES, BindingTable, ModelConfig, PagedGroup, StateGroup, WindowGroup
from dgpp_core.checkpoint.cuts import cut_shape, naming
from dgpp_core.checkpoint.headers import DTYPE_BITS, ROUNDED_ROWS, STAGING_BYTES
from dgpp_core.checkpoint.parameters import Parameter, parameters
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.families import GRAPHS, family_sizes, step_depths
from dgpp_core.engine.geometry import Geometry, pool_shape, snapshot_bytes
from dgpp_core.formats.resident import WIDENED, Bf16Form, DeviceKind, resident_bytes, stored_bytes

GIB, MIB = 2**30, 2**20

RUNTIME_BYTES: dict[DeviceKind, int] = {"cpu": 296 * MIB, "cuda": 720 * MIB}
"""Resident set of the process beside what is counted below. cpu: 225 MiB after importing torch 2.13.0+cpu, 245 MiB with
the first products of every kind, 293 MiB with SmolLM2-135M loaded, its tensors left out: what loading leaves in the
allocator counts too (x86-64, Python 3.11, 2026-11-29). cuda: a bound on a context with its libraries' workspaces,
703 MiB with 40 graphs, which are counted apart (H200, torch 2.11, 2026-11-30)."""

ALLOCATOR_PERMILLE = 12
"""What torch reserves on a GPU beyond the tensors it holds, of their bytes: 0.47 GB of 38.6 with 16 layers of GLM-4.7
(H200, torch 2.11, segments that grow, 2026-11-29)."""

CONVERSION_BYTES = 32
"""Bytes a value that quantising a matrix at load takes: it in float32, and a few float32 steps of the encoder."""

PACKING_BYTES = 256 * MIB
"""What reordering a matrix takes at once on a GPU."""

DECODING_BYTES = 24
"""The same of decoding one on a CPU: indices of eight bytes, and levels, scales and values in float32."""

_NUMBER_BYTES = 8

IN_FILES = "ngram_table mmap"
"""The setting that leaves a table where it is."""

GRAPH_BYTES = MIB
"""A bound on what a captured graph of some hundred launches takes on the device."""

ATTENTION_ROWS = 128
"""Prefill rows that share one attention product: `dgpp_core.layers.paged.CHUNK_ROWS`."""
_ROW_TILE = 8
_KEY_TILE, _LEAST_KEYS = 64, 2


class PlanLine(msgspec.Struct, frozen=True):
    """One item, in bytes a rank; ``exact`` where it is a tensor that is allocated as counted."""

    name: str
    bytes: int
    note: str = ""
    exact: bool = False


def weight_lines(
    table: BindingTable, world: int, device: DeviceKind, bf16_form: Bf16Form = "checkpoint"
) -> Iterator[PlanLine]:
    """Resident bytes a role, quantised matrices by storage, the second resident forms of ``table.shared``.

    The note of embeddings says what of them may stay in files; see `IN_FILES`.
    """
    held, tables = parameters(table, world), {lookup.target for lookup in table.lookups}
    movable = sum(held[name].bytes(device) for name in tables & held.keys())
    kinds: dict[str, list[Parameter]] = {"linear": [], "embedding": [], "vector": []}
    for parameter in held.values():
        storage = parameter.storage(device)
        kinds.setdefault(parameter.role if storage == "dense" else f"linear, {storage}", []).append(parameter)
    for kind, chosen in kinds.items():
        if chosen:
            count = sum(parameter.elements for parameter in chosen)
            total = sum(parameter.bytes(device, bf16_form) for parameter in chosen)
            note = f"{count / 1e6:.1f} M parameters"
            if kind == "embedding" and movable:
                note += f", {movable / GIB:.1f} GiB of it may stay in files: {IN_FILES}"
            yield PlanLine(f"weights: {kind}", total, note, exact=True)
    if device == "cpu":
        for source, target in table.shared:
            copy = resident_bytes("linear", held[source].shape, device)
            yield PlanLine(f"weights: {target}", copy, f"{source} in packed form", exact=True)
        return
    for again in table.recoded:
        rows, columns = held[again.target].shape
        with naming(held[again.target].bindings[0], again.storage, world):
            nbytes = stored_bytes(again.storage, (rows, columns))
        yield PlanLine(f"weights: {again.target} again", nbytes, f"in {again.storage}", exact=True)


def table_lines(
    table: BindingTable, settings: EngineSettings, geometry: Geometry, world: int, device: DeviceKind
) -> Iterator[PlanLine]:
    """What tables in the checkpoint's files take: on a GPU pinned room for the rows of the largest step, and their
    numbers.

    What the system caches of the files is not counted: it gives that memory to whoever needs it. The note says how much
    there is to cache.
    """
    tokens = max(chunk_rows(settings, geometry), geometry.slots * geometry.step_width)
    for lookup in table.lookups if table.on_disk else ():
        parts = [binding for binding in table.on_disk if binding.target == lookup.target]
        size = max(DTYPE_BITS[name] for name in parts[0].formats) // 8
        width = size * math.prod(parts[0].shape[1:])
        held = sum(cut_shape(binding, world)[0] for binding in parts) * width
        room = tokens * lookup.rows * (width + _NUMBER_BYTES) if device == "cuda" else 0
        note = f"{held / GIB:.1f} GiB in files, read by row; free memory caches them"
        yield PlanLine(f"table in files: {lookup.target}", room, note)


def loading_bytes(table: BindingTable, world: int, device: DeviceKind, bf16_form: Bf16Form = "checkpoint") -> int:
    """What loading takes on the way and has given back before the first pool is allocated.

    cpu: a read buffer, and of the largest matrix: its float32 values, a probe of its shape and the probe's packed
    form. Of a stack the whole as it was read; of a quantised one `DECODING_BYTES` a value of a matrix.
    cuda: a resident form takes the place of the stored one, `PACKING_BYTES` at a time; `CONVERSION_BYTES` a value of
    the largest matrix that is converted, and of one that is rounded as much for `ROUNDED_ROWS` of its rows, beside a
    byte a value. A bf12 form is made beside the matrix, and so are widened values.
    """
    held = parameters(table, world)
    if device == "cuda":
        converted = (b for p in held.values() for b in p.bindings if b.resident not in ("", b.storage))
        recoding = CONVERSION_BYTES * max((math.prod(cut_shape(b, world)) for b in converted), default=0)
        rounded = (b.shape for p in held.values() for b in p.bindings if b.source)
        most = max((rows * k + CONVERSION_BYTES * min(rows, ROUNDED_ROWS) * k for rows, k in rounded), default=0)
        recoding = max(recoding, most)
        dense = (p for p in held.values() if p.role == "linear" and p.storage(device) == "dense")
        beside = 0 if bf16_form == "checkpoint" else max((p.bytes(device) for p in dense), default=0)
        stored = ((p, p.storage(device)) for p in held.values())
        beside = max(beside, *(p.loaded_bytes(storage) for p, storage in stored if storage in WIDENED), 0)
        return PACKING_BYTES + max(recoding, beside)
    sources = {source for source, _ in table.shared}
    packed = [p for name, p in held.items() if len(p.shape) >= 2 and (p.role == "linear" or name in sources)]
    return STAGING_BYTES + max(map(_packing_bytes, packed), default=0)


def _packing_bytes(parameter: Parameter) -> int:
    shape = (*parameter.shape[:-2], parameter.matrix_rows, parameter.shape[-1])
    packing = 8 * math.prod(shape) + resident_bytes("linear", shape, "cpu")
    if parameter.bindings[0].storage != "dense":
        return parameter.bytes("cuda") + DECODING_BYTES * math.prod(shape) + packing
    return packing + (4 * parameter.elements if parameter.entries > 1 else 0)


def row_bytes(group: PagedGroup) -> int:
    """Bytes of one token's rows in all layers, on the average of the ranks that divide them."""
    return group.layers * group.heads * group.width * DTYPE_BYTES[group.dtype] // group.ranks


def state_lines(groups: Sequence[StateGroup], geometry: Geometry) -> Iterator[PlanLine]:
    """The pools of all groups and the snapshot arena, as `dgpp_core.engine.state` allocates them."""
    for group in groups:
        total = math.prod(pool_shape(group, geometry)) * DTYPE_BYTES[group.dtype]
        if isinstance(group, PagedGroup):
            note = f"{geometry.blocks} + 1 blocks of {geometry.block_tokens} tokens"
            if group.ranks > 1:
                note += f", divided among {group.ranks} ranks"
        elif isinstance(group, WindowGroup):
            note = f"{geometry.slots} + 1 rings of {group.window} + {geometry.step_width} tokens"
        else:
            note = f"{geometry.slots} + 1 slots, {geometry.step_width} candidates each"
        yield PlanLine(f"state: {group.name}", total, note, exact=True)
    if geometry.snapshots:
        arena = geometry.snapshots * snapshot_bytes(groups, geometry.step_width)
        yield PlanLine("prefix snapshots", arena, f"{geometry.snapshots} snapshots", exact=True)


class Widths(msgspec.Struct, frozen=True):
    """Widths that bound a forward's scratch, a rank's share.

    Attributes:
        hidden: of the residual stream.
        linear: the most values that a prefill row becomes in a product: output rows of a matrix, times those of a
            stack that the row goes through. The output head does not run over prefill rows.
        inner: the next fewer. On a GPU a stack of gates and their products leaves half as many, gated.
        query: of a row's queries, all heads together. The plan is not told it and takes the hidden size or the widest
            key/value row, whichever is more.
        world: ranks.
    """

    hidden: int
    linear: int
    inner: int
    query: int
    world: int

    @classmethod
    def of(cls, table: BindingTable, groups: Sequence[StateGroup], config: ModelConfig, world: int) -> Widths:
        """The widths of a model."""
        vocab = {config.vocab_size, -(-config.vocab_size // world)}
        matrices = [p for p in parameters(table, world).values() if p.role == "linear" and len(p.shape) >= 2]
        widths = sorted({p.met * p.matrix_rows for p in matrices if p.shape[-2] not in vocab}, reverse=True)
        kept = [group.heads * group.width for group in groups if isinstance(group, PagedGroup | WindowGroup)]
        linear, inner = (*widths, config.hidden_size, config.hidden_size)[:2]
        if any(p.met * p.matrix_rows == inner and _gated(p, matrices) for p in matrices):
            inner //= 2
        return cls(config.hidden_size, linear, inner, max([-(-config.hidden_size // world), *kept]), world)


def _gated(stack: Parameter, matrices: Sequence[Parameter]) -> bool:
    """Whether a routed stack's rows are gates and what they let through: another takes half as many values."""
    return stack.met > 1 and any(2 * each.shape[-1] == stack.matrix_rows and each.met == stack.met for each in matrices)


def scratch_lines(
    groups: Sequence[StateGroup],
    vocab_size: int,
    settings: EngineSettings,
    geometry: Geometry,
    widths: Widths,
    device: DeviceKind,
) -> Iterator[PlanLine]:
    """Bounds on what the largest admitted step needs beyond weights and state.

    * logits: two copies (raw and processed) of max(8, slots x step width) rows of float32.
    * sampler: token counts and masks, 8 bytes a slot and vocabulary entry.
    * activations: rows, the larger of a prefill chunk and a decode step, times the values of a row. cpu: (4 x hidden +
      2 x the widest product) in float32. cuda: the residual stream and the widest product in float32; the stream's
      norm, two copies of it and the product before the widest in bfloat16; with a drafter, the hidden states that it is
      given in float32, and they with the embeddings in bfloat16. Measured with 16 layers of GLM-4.7 (H200, 2026-11-30):
      256 to 262 KB a row of 263, with its drafter 296 of 304.
    * attention: see `attention_bytes`. A GPU's kernels hold no scores, and what they do hold the activations cover.
    * decode graphs: what each captured shape keeps (logits, hidden states in float32 and a copy), its graphs, and
      the sampler's weights of the largest shape, 8 bytes a row and vocabulary entry.
    """
    decode_rows = max(_ROW_TILE, geometry.slots * geometry.step_width)
    chunk = chunk_rows(settings, geometry)
    rows = max(chunk, decode_rows)
    each = 4 * (4 * widths.hidden + 2 * widths.linear)
    if device == "cuda":
        each = 4 * (widths.hidden + widths.linear) + 2 * (3 * widths.hidden + widths.inner)
        each += 8 * widths.hidden * (geometry.step_width > 1)
    activations = rows * each
    yield PlanLine("logits", 2 * decode_rows * vocab_size * 4, f"2 x {decode_rows} rows")
    yield PlanLine("sampler", geometry.slots * vocab_size * 8, f"{geometry.slots} slots")
    yield PlanLine("activations", activations, f"{rows} rows")
    if device == "cpu":
        attention = attention_bytes(groups, chunk, geometry, widths)
        yield PlanLine("attention", attention, f"{min(chunk, ATTENTION_ROWS)} rows over {geometry.context} tokens")
    elif settings.decode_graph:
        sizes, depths = family_sizes(geometry.slots), step_depths(geometry.step_width - 1, settings)
        kept = sum(sizes) * sum(1 + depth for depth in depths) * 4 * (vocab_size + 2 * widths.hidden)
        weights = geometry.slots * geometry.step_width * vocab_size * 8
        shapes = len(sizes) * len(depths)
        total = GRAPHS * shapes * GRAPH_BYTES + kept + weights
        yield PlanLine("decode graphs", total, f"{GRAPHS} graphs each of {shapes} shapes")


def chunk_rows(settings: EngineSettings, geometry: Geometry) -> int:
    """Prompt tokens of the largest prefill chunk."""
    whole = geometry.context
    return min(whole, max(settings.busy_budget or whole, settings.idle_budget or whole))


def attention_bytes(groups: Sequence[StateGroup], chunk: int, geometry: Geometry, widths: Widths) -> int:
    """The most that one layer's attention (`dgpp_core.ops.tile_attention`) holds at once, in float32.

    For one group, with S = scores = keys x padded rows x kv heads: three copies of S (raw, shifted, exponent), the
    queries and the values spread over key tiles (S x width / tile each), and the gathered keys and values, of a
    divided pool every rank's. Taken at
    the larger of one prefill product over the whole context and a decode step of every slot over it.
    """
    worst = 0
    for group in groups:
        if isinstance(group, PagedGroup):
            tile, rows, reach = max(_LEAST_KEYS, geometry.block_tokens), min(chunk, ATTENTION_ROWS), geometry.context
            gathered = widths.world if group.ranks > 1 else 0
        elif isinstance(group, WindowGroup):
            tile, rows, reach = _KEY_TILE, chunk, group.window + max(chunk, geometry.step_width) + 2 * _KEY_TILE
            gathered = 0
        else:
            continue
        share = -(-max(group.heads, -(-widths.query // group.width)) // group.heads)
        for segments, count in ((1, rows), (geometry.slots, geometry.step_width)):
            keys = segments * -(-reach // tile) * tile
            scores = keys * group.heads * -(-count * share // _ROW_TILE) * _ROW_TILE
            worst = max(
                worst,
                4 * (3 * scores + 2 * scores * group.width // tile + (2 + gathered) * keys * group.heads * group.width),
            )
    return worst
