"""What the model's encoder makes of pictures, and where rotary embeddings see a slot's positions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from dgpp_core.api import EngineError, Seeing, SeenRows, Vision
from dgpp_core.engine.operations import Prefill
from dgpp_core.engine.pending import SlotInfo
from dgpp_core.engine.transfer import upload
from dgpp_core.formats.resident import SEEN_BYTES
from dgpp_core.images.patches import grid_places, patches
from dgpp_core.images.picture import Picture


class Sight:
    """Encodes pictures, one at a time, and keeps the rows of the latest.

    A picture's rows depend on nothing but its pixels, so that it is all one whether they are kept or made again.

    Args:
        kept_bytes: of rows; one picture's are kept whatever they take.
    """

    def __init__(self, model: Seeing, vision: Vision, device: torch.device, *, kept_bytes: int = SEEN_BYTES) -> None:
        self._model, self.vision, self._device, self._kept_bytes = model, vision, device, kept_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.bytes = 0

    def rows(self, picture: Picture) -> Tensor:
        """``[tokens, width]``, finite."""
        if (kept := self._kept.get(picture.digest)) is not None:
            self._kept.move_to_end(picture.digest)
            return kept
        rows, columns = self.vision.grid(picture.height, picture.width)
        made = self._model.see(torch.from_numpy(patches(picture, self.vision)).to(self._device), rows, columns)
        if len(made) != picture.tokens or not bool(made.isfinite().all()):
            raise ValueError(f"{len(made)} rows for {picture.tokens} tokens, or rows that are not finite")
        self._kept[picture.digest] = made
        self.bytes += made.nbytes
        while self.bytes > self._kept_bytes and len(self._kept) > 1:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    @torch.inference_mode()
    def fault(self, pictures: Sequence[Picture]) -> str:
        """Why these cannot be encoded, empty where they can: found before a request has any state to spoil.

        Raises:
            EngineError: the ranks do not agree, or one is gone: that is no fault of an image.
        """
        try:
            for picture in pictures:
                self.rows(picture)
        except EngineError:
            raise
        except Exception as error:
            return f"an image could not be encoded: {type(error).__name__}: {error}"
        return ""

    def seen(self, ops: Sequence[Prefill], infos: Sequence[SlotInfo]) -> SeenRows | None:
        """The rows of a prefill step that are pictures'; None where none is."""
        rows: list[int] = []
        values: list[Tensor] = []
        before = 0
        for op, info in zip(ops, infos, strict=True):
            for picture in info.pictures:
                first, last = max(op.start, picture.start), min(op.start + op.count, picture.end)
                if first < last:
                    rows += range(before + first - op.start, before + last - op.start)
                    values.append(self.rows(picture)[first - picture.start : last - picture.start])
            before += op.count
        return SeenRows(upload(rows, self._device), torch.cat(values)) if values else None


class Places:
    """Time, row and column of every position of every slot, for models whose positions are a ``grid``.

    Attributes:
        table: int32 ``[slots + 1, 3, positions]``; without pictures each position's own number, three times.
    """

    def __init__(self, vision: Vision, slots: int, positions: int, device: torch.device) -> None:
        self._vision, self._device = vision, device
        own = torch.arange(positions, dtype=torch.int32, device=device)
        self.table = own.expand(slots + 1, 3, positions).contiguous()
        self._own, self._moved = own, [False] * slots

    def begin(self, slot: int, pictures: Sequence[Picture]) -> None:
        """A slot's request has these pictures."""
        if pictures:
            found = grid_places(self.table.shape[2], pictures, self._vision)
            self.table[slot] = torch.from_numpy(found).to(self._device)
        elif self._moved[slot]:
            self.table[slot] = self._own
        self._moved[slot] = bool(pictures)
