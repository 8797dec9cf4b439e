import subprocess
import sys

import msgspec
import pytest

from dgpp_core.api.errors import EngineError
from dgpp_core.engine.operations import Begin, Decode, Prefill, Release, SlotResult, StepResult, TokenLogprobs
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Ending, Submit, Update
from dgpp_core.scheduler.scheduler import Scheduler, TickInput, TickOutput
from dgpp_core.testing.scheduler_world import SchedulerWorld


def limits(**fields: object) -> Limits:
    return Limits(**({"slots": 4, "blocks": 64, "block_tokens": 4, "max_context": 128, "prefill_budget": 8} | fields))


def submit(name: int = 0, tokens: int = 3, max_tokens: int = 8, **fields: object) -> Submit:
    return Submit(id=name, tokens=tuple(range(name, name + tokens)), max_tokens=max_tokens, params=GREEDY, **fields)


def result(tick: int, *tokens: int, slot: int = 0, request: int = 0, **fields: object) -> StepResult:
    return StepResult(tick, (SlotResult(slot, request, tokens, **fields),))


def kinds(output: TickOutput) -> list[str]:
    return [type(operation).__name__ for operation in output.operations]


def prefills(output: TickOutput) -> list[tuple[int, int, int, bool]]:
    return [(each.slot, each.start, each.count, each.last) for each in output.operations if isinstance(each, Prefill)]


class TestPrefill:
    def test_a_prompt_is_cut_by_the_budget_and_decodes_from_the_next_tick_on(self) -> None:
        world = SchedulerWorld(limits())
        world.submit(range(19), 3)
        seen = [(kinds(out), prefills(out)) for out in (world.tick() for _ in range(5))]
        assert seen == [
            (["Begin", "Prefill"], [(0, 0, 8, False)]),
            (["Prefill"], [(0, 8, 8, False)]),
            (["Prefill"], [(0, 16, 3, True)]),
            (["Decode"], []),
            (["Decode"], []),
        ]

    def test_prompts_share_a_budget_oldest_first(self) -> None:
        world = SchedulerWorld(limits())
        for name in range(3):
            world.submit(range(name * 100, name * 100 + 5), 3)
        assert prefills(world.tick()) == [(0, 0, 5, True), (1, 0, 3, False)]
        assert prefills(world.tick()) == [(1, 3, 2, True), (2, 0, 5, True)]

    def test_budgets_follow_whether_anything_decodes(self) -> None:
        world = SchedulerWorld(limits(prefill_budget=2, prefill_idle_budget=16))
        world.submit(range(4), 3)
        world.submit(range(50, 80), 3)
        counts = [sum(each[2] for each in prefills(world.tick())) for _ in range(5)]
        assert counts == [16, 2, 2, 14, 0]

    def test_budget_zero_is_whole_prompts(self) -> None:
        world = SchedulerWorld(limits(prefill_budget=0))
        world.submit(range(50), 3)
        world.submit(range(60, 110), 3)
        assert prefills(world.tick()) == [(0, 0, 50, True), (1, 0, 50, True)]

    def test_decodes_go_on_beside_a_prompt(self) -> None:
        world = SchedulerWorld(limits())
        world.submit(range(3), 20)
        world.tick()
        world.submit(range(50, 80), 3)
        assert [kinds(world.tick())[-2:] for _ in range(4)] == [["Prefill", "Decode"]] * 4

    def test_slots_are_given_lowest_first_and_decoded_in_order(self) -> None:
        world = SchedulerWorld(limits())
        for name in range(3):
            world.submit([name], 4 if name != 1 else 1)
        world.tick()
        late = world.submit([9], 4)
        output = world.tick()
        begin = next(each for each in output.operations if isinstance(each, Begin))
        assert (begin.request, begin.slot) == (late, 1)
        assert Decode(slots=(0, 2), depth=0) in output.operations
        assert Decode(slots=(0, 1, 2), depth=0) in world.tick().operations


class TestResults:
    def test_two_steps_may_be_in_flight_and_never_three(self) -> None:
        scheduler = Scheduler(limits())
        outputs = [scheduler.tick(TickInput(submissions=(submit(),)))] + [scheduler.tick(TickInput()) for _ in range(3)]
        assert [kinds(output) for output in outputs] == [["Begin", "Prefill"], ["Decode"], [], []]
        assert kinds(scheduler.tick(TickInput(results=(result(1, 50),)))) == ["Decode"]

    def test_no_step_is_launched_behind_one_that_must_be_the_last(self) -> None:
        scheduler = Scheduler(limits())
        first = scheduler.tick(TickInput(submissions=(submit(max_tokens=2),)))
        assert kinds(scheduler.tick(TickInput())) == ["Decode"]
        output = scheduler.tick(TickInput(results=(result(first.tick, 50),)))
        assert output.operations == ()
        assert not scheduler.idle

    def test_a_late_result_of_an_ended_request_leaves_no_trace(self) -> None:
        scheduler = Scheduler(limits())
        scheduler.tick(TickInput(submissions=(submit(eos_ids=(50,)),)))
        scheduler.tick(TickInput())
        output = scheduler.tick(TickInput(results=(result(1, 50),), submissions=(submit(1),)))
        assert output.endings == (Ending(id=0, reason="eos", miss="below a block"),)
        assert [type(each) for each in output.operations] == [Release, Begin, Prefill]
        late = scheduler.tick(TickInput(results=(result(2, 51),)))
        assert (late.updates, late.endings) == ((), ())
        assert scheduler.stats().tokens_generated == 1

    def test_tokens_after_an_ending_are_discarded_with_their_logprobs(self) -> None:
        scheduler = Scheduler(limits(depth=3))
        scheduler.tick(TickInput(submissions=(submit(eos_ids=(7, 8)),)))
        scheduler.tick(TickInput(results=(result(1, 50),)))
        probs = tuple(TokenLogprobs(-float(at)) for at in range(4))
        output = scheduler.tick(TickInput(results=(result(2, 5, 8, 7, 6, logprobs=probs, drafted=3),)))
        assert output.updates == (Update(id=0, tokens=(5, 8), logprobs=probs[:2]),)
        assert output.endings == (Ending(id=0, reason="eos", miss="below a block"),)

    def test_max_tokens_ends_inside_a_step_and_eos_on_the_last_token_wins(self) -> None:
        for eos, reason in (((), "length"), ((6,), "eos")):
            scheduler = Scheduler(limits(depth=3))
            scheduler.tick(TickInput(submissions=(submit(max_tokens=3, eos_ids=eos),)))
            scheduler.tick(TickInput(results=(result(1, 4),)))
            output = scheduler.tick(TickInput(results=(result(2, 5, 6, 7, 8),)))
            assert output.updates == (Update(id=0, tokens=(5, 6)),)
            assert output.endings[0].reason == reason

    @pytest.mark.parametrize(
        "answer",
        [
            result(9, 50),
            StepResult(1, ()),
            result(1),
            result(1, 50, 51),
            result(1, 50, request=3),
            result(1, 50, slot=2),
        ],
        ids=["unknown tick", "no answer", "no token", "too many tokens", "another request", "another slot"],
    )
    def test_a_result_that_answers_nothing_launched_is_an_error(self, answer: StepResult) -> None:
        scheduler = Scheduler(limits())
        scheduler.tick(TickInput(submissions=(submit(),)))
        with pytest.raises(EngineError, match="result"):
            scheduler.tick(TickInput(results=(answer,)))

    def test_a_result_comes_once(self) -> None:
        scheduler = Scheduler(limits())
        scheduler.tick(TickInput(submissions=(submit(),)))
        scheduler.tick(TickInput(results=(result(1, 50),)))
        with pytest.raises(EngineError, match="no launched step"):
            scheduler.tick(TickInput(results=(result(1, 50),)))

    def test_a_tick_of_middle_chunks_alone_is_outstanding_until_its_empty_result(self) -> None:
        scheduler = Scheduler(limits())
        scheduler.tick(TickInput(submissions=(submit(tokens=20),)))
        scheduler.tick(TickInput(cancels=(0,)))
        assert not scheduler.idle
        scheduler.tick(TickInput(results=(StepResult(1, ()),)))
        assert scheduler.idle


class TestInterrupts:
    def test_a_cancel_beats_a_stop(self) -> None:
        scheduler = Scheduler(limits())
        output = scheduler.tick(TickInput(submissions=(submit(),), stops=(0,), cancels=(0,)))
        assert output.endings == (Ending(id=0, reason="cancelled"),)

    def test_a_stop_discards_what_the_same_tick_brings(self) -> None:
        scheduler = Scheduler(limits())
        scheduler.tick(TickInput(submissions=(submit(),)))
        output = scheduler.tick(TickInput(stops=(0,), results=(result(1, 50),)))
        assert output.updates == ()
        assert output.endings == (Ending(id=0, reason="stop", miss="below a block"),)

    def test_late_and_repeated_ones_do_nothing(self) -> None:
        scheduler = Scheduler(limits())
        scheduler.tick(TickInput(submissions=(submit(),)))
        output = scheduler.tick(TickInput(cancels=(0, 0, 5), stops=(0, 7)))
        assert len(output.endings) == 1
        assert scheduler.tick(TickInput(cancels=(0,), stops=(0,), results=(result(1, 50),))).endings == ()

    def test_an_id_submitted_twice_while_live_is_an_error_and_may_return_later(self) -> None:
        scheduler = Scheduler(limits())
        scheduler.tick(TickInput(submissions=(submit(),)))
        scheduler.tick(TickInput(cancels=(0,)))
        scheduler.tick(TickInput(submissions=(submit(),), results=(result(1, 50),)))
        with pytest.raises(EngineError, match="submitted twice"):
            scheduler.tick(TickInput(submissions=(submit(),)))


class TestDigest:
    def test_it_follows_the_operations_alone(self) -> None:
        first, second = Scheduler(limits()), Scheduler(limits(queue=9))
        assert first.digest == second.digest == 0
        for scheduler in (first, second):
            scheduler.tick(TickInput())
            scheduler.tick(TickInput(submissions=(submit(),)))
        assert first.digest == second.digest != 0

    @pytest.mark.parametrize("change", [{"tokens": (0, 1, 3)}, {"logprobs": 2}, {"params": {"seed": 1}}])
    def test_any_difference_shows(self, change: dict[str, object]) -> None:
        if "params" in change:
            change = {"params": msgspec.structs.replace(GREEDY, seed=1)}
        first, second = Scheduler(limits()), Scheduler(limits())
        first.tick(TickInput(submissions=(submit(),)))
        second.tick(TickInput(submissions=(msgspec.structs.replace(submit(), **change),)))
        assert first.digest != second.digest

    def test_it_remembers(self) -> None:
        first, second = Scheduler(limits()), Scheduler(limits())
        first.tick(TickInput(submissions=(submit(0),)))
        second.tick(TickInput(submissions=(submit(1),)))
        first.tick(TickInput(results=(result(1, 50),)))
        second.tick(TickInput(results=(result(1, 50, request=1),)))
        assert first.digest != second.digest


def test_the_scheduler_needs_no_torch() -> None:
    code = (
        "import sys, dgpp_core.scheduler.scheduler, dgpp_core.testing.scheduler_world; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
