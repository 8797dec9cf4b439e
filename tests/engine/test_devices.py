"""Names of devices, as options and settings give them."""

import pytest
import torch

from dgpp_core.api import ConfigError
from dgpp_core.engine.factory import pick_device


def test_a_device_by_name() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["", "meta", "mps", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:4096"])
def test_what_names_no_device_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pick_device(name)
    assert (caught.value.where, caught.value.found) == ("--device", name)
