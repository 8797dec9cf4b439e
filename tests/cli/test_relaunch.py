"""Starting again: as often as allowed, with the next epoch, and only with the configuration of the first start."""

from __future__ import annotations

import msgspec
import pytest

from dgpp_core.api import ConfigError
from dgpp_core.cli.relaunch import Relaunch
from dgpp_core.server.options import ServeOptions, WorldOptions


def options(epoch: int, settings: bytes = b'{"kv_capacity":4096}', **fields: object) -> ServeOptions:
    world = WorldOptions(size=2, log_dir="/log", epoch=epoch)
    plain = ServeOptions(model="m", served_id="m", checkpoint="/c", settings=settings, world=world)
    return msgspec.structs.replace(plain, **fields)


def test_it_starts_again_as_often_as_allowed_with_the_next_epoch() -> None:
    again = Relaunch(options, 5, 2, elsewhere=False, pause=0.0)
    epochs = [again.options.world]
    while again.again():
        epochs.append(again.options.world)
    assert [world.epoch for world in epochs if world is not None] == [5, 6, 7]


def test_another_configuration_is_refused_and_every_difference_named() -> None:
    found = {1: options(1), 2: options(2, b'{"kv_capacity":8192}', device="cuda")}
    again = Relaunch(found.__getitem__, 1, 1, elsewhere=False, pause=0.0)
    with pytest.raises(ConfigError, match="has changed") as raised:
        again.again()
    assert raised.value.where == "settings, device"
    assert "8192" in raised.value.found
    assert "4096" in raised.value.expected


def test_a_world_of_one_is_started_again_too() -> None:
    again = Relaunch(lambda epoch: options(epoch, world=None), 1, 1, elsewhere=False, pause=0.0)
    assert again.again()
    assert not again.again()


def test_ranks_that_are_started_elsewhere_are_not_started_again_from_here() -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        Relaunch(options, 1, 1, elsewhere=True)
    assert not Relaunch(options, 1, 0, elsewhere=True).again()
