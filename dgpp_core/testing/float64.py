"""Reference models in float64, their own casts included: a float32 forward is then compared with no rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)


class Float64(TorchFunctionMode):
    """Within it, whatever asks for float32 by name gets float64: casts, factories, the dtype of a softmax."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def float64(model: M) -> M:
    """A copy with float64 parameters; run it within `Float64`.

    A transformers model's experts are computed one by one then: its grouped product knows no float64.
    """
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    return wide
