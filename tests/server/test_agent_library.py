"""An agent library, as its users have it, runs its own tool loop against the service: several turns, streamed and not.

The loop, its stream reader, its checks of arguments and its judgement of structured output are the library's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import agents
import openai
import pydantic
import pytest

from dgpp_core.testing.fake_service import TOOL_TEMPLATE
from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.testing.tiny_service import tiny_service
from dgpp_core.testing.tool_replies import dialect
from dgpp_core.text.tools.dialect import Call

ODD_CITY = '5 "Köln"\n世界'

KINDS: dict[str, Any] = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


class Verdict(pydantic.BaseModel):
    """A structured final output."""

    warm: bool
    degrees: int


@pytest.fixture(scope="module")
def running(serve_fake: Any, write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    glm = dialect("glm")
    folder = write_checkpoint(tmp_path_factory.mktemp("glm"), ("<think>", "</think>", *glm.markers), TOOL_TEMPLATE)
    two = [Call("weather", {"city": "Rome", "days": 1}), Call("weather", {"city": ODD_CITY, "days": 3})]
    replies = (
        FakeReply(match="And tomorrow?", text="<think>They ask on.</think>Warmer still."),
        FakeReply(match="midnight", text='<think>So.</think>{"warm": true, "degrees": 22}'),
        FakeReply(match="noon", text="<think>Now I know.</think>It is warm at noon."),
        FakeReply(match="22 degrees", text=f"<think>The time, too.</think>{glm.render([Call('get_time', {})])}"),
        FakeReply(match="counter", text=f"<think>First it.</think>I look.{glm.render(two, after_text=True)}"),
        FakeReply(match="", text=glm.render([Call("transfer_to_weather_desk", {})])),
    )
    with serve_fake(
        FakeScript(replies=replies, constrained=True, tokens_per_step=3), model=folder, default_max_tokens=2000
    ) as found:
        yield found


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    pytest.importorskip("dgpp_glm")
    with tiny_service("glm47") as found:
        yield found


class Desk:
    """Agents of the library with two tools, and what the tools were called with."""

    def __init__(self, url: str, api: str, now: str = "noon") -> None:
        self.now = now
        self.made: list[Any] = []
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=30)
        self.model = KINDS[api]("fake", client)
        self.tools = [agents.function_tool(self.weather), agents.function_tool(self.get_time)]

    def weather(self, city: str, days: int) -> str:
        """The weather.

        Args:
            city: where.
            days: for how long.
        """
        self.made.append((city, days))
        return "22 degrees"

    def get_time(self) -> str:
        """The time."""
        self.made.append("time")
        return self.now

    def agent(self, **fields: Any) -> Any:
        return agents.Agent(name="weather desk", instructions="counter", model=self.model, tools=self.tools, **fields)


async def run(agent: Any, items: Any, *, streamed: bool) -> Any:
    """The library's loop to its end, and with streaming the text that its deltas gave."""
    config = agents.RunConfig(tracing_disabled=True)
    if not streamed:
        return await agents.Runner.run(agent, items, run_config=config, max_turns=6)
    result = agents.Runner.run_streamed(agent, items, run_config=config, max_turns=6)
    text = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert str(result.final_output) in text or json.loads(text[text.index("{") :])
    return result


CASES = pytest.mark.parametrize(
    ("api", "streamed"), [("chat", False), ("chat", True), ("responses", False), ("responses", True)]
)
CALLED = [("Rome", 1), (ODD_CITY, 3), "time"]


@CASES
def test_two_rounds_of_tools_and_a_second_question(running: Any, api: str, streamed: bool) -> None:
    async def talk() -> None:
        desk = Desk(running.url, api)
        counted = agents.ModelSettings(include_usage=True)
        first = await run(desk.agent(model_settings=counted), "How warm is it?", streamed=streamed)
        assert first.final_output == "It is warm at noon."
        assert sorted(map(str, desk.made)) == sorted(map(str, CALLED))
        assert len(first.raw_responses) == 3
        usage = first.context_wrapper.usage
        assert usage.requests == 3
        assert usage.input_tokens == sum(len(sent["tokens"]) for sent in running.messages("submit")[-3:])
        again = [*first.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
        second = await run(desk.agent(), again, streamed=streamed)
        assert second.final_output == "Warmer still."
        assert len(second.raw_responses) == 1

    asyncio.run(talk())
    running.await_idle()


@CASES
def test_a_handoff_and_structured_output(running: Any, api: str, streamed: bool) -> None:
    async def talk() -> None:
        desk = Desk(running.url, api, "midnight")
        front = agents.Agent(
            name="front", instructions="greet", model=desk.model, handoffs=[desk.agent(output_type=Verdict)]
        )
        result = await run(front, "How warm is it?", streamed=streamed)
        assert result.last_agent.name == "weather desk"
        assert result.final_output == Verdict(warm=True, degrees=22)
        assert sorted(map(str, desk.made)) == sorted(map(str, CALLED))

    asyncio.run(talk())
    grammar = running.messages("submit")[-1]["grammar"]
    assert "degrees" in grammar["source"]
    running.await_idle()


@CASES
def test_a_tool_that_must_be_called(running: Any, api: str, streamed: bool) -> None:
    async def talk() -> None:
        desk = Desk(running.url, api)
        settings = agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=True, temperature=0.5, max_tokens=900
        )
        result = await run(desk.agent(model_settings=settings), "How warm is it?", streamed=streamed)
        assert result.final_output == "It is warm at noon."

    before = len(running.messages("submit"))
    asyncio.run(talk())
    sent = running.messages("submit")[before:]
    # The library asks for a call in its first turn only, and lets the model end after that.
    assert [message["max_tokens"] for message in sent] == [900] * 3
    assert all(message["grammar"] is not None for message in sent)
    assert sent[0]["grammar"] != sent[1]["grammar"]


@pytest.mark.slow
def test_a_real_engine_makes_the_calls(tiny: Any) -> None:
    """Random weights, held to a strict schema: whatever they write is a call that the library takes."""
    made: list[tuple[str, int]] = []

    @agents.function_tool
    def measure(unit: Literal["kelvin", "celsius"], by: Annotated[int, pydantic.Field(ge=1, le=20)]) -> str:
        """Measure."""
        made.append((unit, by))
        return "22 degrees"

    async def talk() -> None:
        client = openai.AsyncOpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0, timeout=120)
        settings = agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=70, temperature=0.0
        )
        agent = agents.Agent(
            name="a", instructions="b", model=KINDS["chat"]("tiny", client), tools=[measure], model_settings=settings
        )
        for streamed in (False, True):
            result = await run(agent, "How warm is it?", streamed=streamed)
            assert isinstance(result.final_output, str)
            assert len(result.raw_responses) > 1

    asyncio.run(talk())
    assert len(made) > 1
    assert made[: len(made) // 2] == made[len(made) // 2 :], "streamed or not, the reply is the same"
    assert all(unit in ("kelvin", "celsius") and 1 <= by <= 20 for unit, by in made)
