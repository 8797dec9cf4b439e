"""Images in prompts: prefixes are one where they show the same, whatever their ids are."""

from array import array
from typing import Any

import pytest

from dgpp_core.engine.operations import Begin
from dgpp_core.images.picture import Picture, picture_digest, prompt_keys
from dgpp_core.scheduler.limits import Limits
from dgpp_core.testing.scheduler_world import SchedulerWorld

PAD = 7
PROMPT = [1, 2, 3, *[PAD] * 20, 4, 5, *[PAD] * 12, 6, *range(20, 40)]


def picture(shade: int, start: int, tokens: int, height: int = 4, width: int = 6) -> Picture:
    rgb = bytes([shade]) * (height * width * 3)
    digest = picture_digest(height, width, rgb)
    return Picture(height=height, width=width, rgb=rgb, tokens=tokens, digest=digest, start=start)


def limits(**fields: Any) -> Limits:
    return Limits(**({"slots": 2, "blocks": 40, "block_tokens": 8, "max_context": 128} | fields))


def cached(*pairs: tuple[int, int], **fields: Any) -> list[int]:
    """Cached tokens of prompts that are the same but for the shades of their two images, one after the other."""
    world = SchedulerWorld(limits(**fields))
    for first, second in pairs:
        world.submit(PROMPT, 2, pictures=(picture(first, 3, 20), picture(second, 25, 12)))
        world.run()
    return [op.cached for out in world.outputs for op in out.operations if isinstance(op, Begin)]


def test_the_same_images_are_found_again() -> None:
    assert cached((1, 2), (1, 2)) == [0, 56]


@pytest.mark.parametrize(
    ("pair", "most"), [((9, 2), 0), ((1, 9), 24), ((2, 1), 0)], ids=["first differs", "second differs", "swapped"]
)
def test_a_prefix_ends_where_an_image_shows_something_else(pair: tuple[int, int], most: int) -> None:
    """Blocks of 8: the first image begins in block 0, the second in block 3."""
    assert cached((1, 2), pair) == [0, most]


def test_a_prompt_of_the_same_ids_without_images_is_another() -> None:
    world = SchedulerWorld(limits())
    for pictures in ((), (picture(1, 3, 20), picture(2, 25, 12)), ()):
        world.submit(PROMPT, 2, pictures=pictures)
        world.run()
    assert [op.cached for out in world.outputs for op in out.operations if isinstance(op, Begin)] == [0, 0, 56]


def test_a_turn_behind_an_image_reuses_it() -> None:
    world, images = SchedulerWorld(limits()), (picture(1, 3, 20), picture(2, 25, 12))
    first = world.submit(PROMPT, 9, pictures=images)
    world.run()
    world.submit([*PROMPT, *world.replies[first], 90, 91], 2, pictures=images)
    world.run()
    begins = [op for out in world.outputs for op in out.operations if isinstance(op, Begin)]
    assert begins[1].cached == 64
    assert begins[1].pictures == images


def test_a_preempted_request_keeps_its_images_and_what_it_was_known_by() -> None:
    world = SchedulerWorld(limits(blocks=16, admission="grow", admission_window=8))
    images = (picture(1, 3, 20), picture(2, 25, 12))
    for _ in range(2):
        world.submit(PROMPT, 60, pictures=images, use_cache=True)
    world.run()
    begins = [op for out in world.outputs for op in out.operations if isinstance(op, Begin)]
    assert len(begins) > 2
    assert all(op.pictures == images for op in begins)
    assert begins[-1].cached >= 56


def test_keys_differ_from_ids_only_in_images_and_hold_the_whole_digest() -> None:
    image = picture(1, 3, 20)
    keys = prompt_keys(PROMPT, (image,))
    assert list(keys[:3]) + list(keys[23:]) == PROMPT[:3] + PROMPT[23:]
    assert all(key < 0 for key in keys[3:23])
    words = array("q", image.digest)
    assert [key % 2**63 for key in keys[3:7]] == [word % 2**63 for word in words]
    assert list(keys[3:7]) * 5 == list(keys[3:23])


@pytest.mark.parametrize(
    "changed",
    [{"start": len(PROMPT) - 19}, {"start": -1}, {"tokens": 0}, {"rgb": b"xx"}, {"digest": b"x"}, {"height": 5}],
    ids=str,
)
def test_an_image_that_is_none_is_refused_at_the_door(changed: dict[str, Any]) -> None:
    import msgspec

    world = SchedulerWorld(limits())
    bad = world.submit(PROMPT, 2, pictures=(msgspec.structs.replace(picture(1, 3, 20), **changed),))
    good = world.submit(PROMPT, 2)
    world.run()
    assert world.endings[bad].reason == "error"
    assert "picture" in world.endings[bad].error
    assert world.endings[good].reason == "length"


def test_images_must_come_in_order() -> None:
    world = SchedulerWorld(limits())
    bad = world.submit(PROMPT, 2, pictures=(picture(2, 25, 12), picture(1, 3, 20)))
    world.run()
    assert "behind one that ends at 37" in world.endings[bad].error
