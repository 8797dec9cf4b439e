"""What a simulated process is: threads whose calls come in order, whatever stops it."""

from functools import partial
from random import Random

import pytest

from dgpp_core.testing.sim.process import WAKE_S, Process
from dgpp_core.testing.sim.timeline import Timeline


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_while_a_process_wakes_stands_behind_what_it_missed(seed: int) -> None:
    timeline, made = Timeline(), list[int]()
    process = Process("one", timeline, Random(seed))
    process.pause()
    for number in range(3):
        process.at("loop", 0.1 + number, partial(made.append, number))
    timeline.at(5.0, process.resume)
    for number in range(3, 9):
        process.on("loop", 5.0 + (number - 2) * WAKE_S / 4, partial(made.append, number))
    while timeline.step():
        pass
    assert made == list(range(9))


def test_a_process_that_is_stopped_again_while_it_wakes_loses_nothing() -> None:
    timeline, made = Timeline(), list[int]()
    process = Process("one", timeline, Random(1))

    def first() -> None:
        made.append(0)
        process.pause()

    process.pause()
    process.at("loop", 0.1, first)
    process.at("loop", 0.2, partial(made.append, 1))
    timeline.at(1.0, process.resume)
    process.on("loop", 2.0, partial(made.append, 2))
    timeline.at(3.0, process.resume)
    while timeline.step():
        pass
    assert made == [0, 1, 2]
