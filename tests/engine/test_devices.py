"""Names of devices, as options and settings give them."""

import pytest
import torch

from dgpp_core.api import ConfigError
from dgpp_core.engine.factory import pick_device


def test_a_device_by_name() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_cuda_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `torch.cuda.set_device` nor a process group takes one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [pick_device(name) for name in ("auto", "cuda", "cuda:0", "cuda:1")]
    assert found == [torch.device("cuda", index) for index in (0, 0, 0, 1)]


@pytest.mark.parametrize("name", ["", "meta", "mps", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:4096"])
def test_what_names_no_device_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pick_device(name)
    assert (caught.value.where, caught.value.found) == ("--device", name)
