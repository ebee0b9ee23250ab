"""The Agents SDK over chat completions: an agent calls its tool, streamed and not; a session of two
turns."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
model = OpenAIChatCompletionsModel("baton-tiny", client)
settings = ModelSettings(temperature=0)


@function_tool
def find_object(object: str, colour: str) -> str:
    """where an object is"""
    print("call", "find_object", sorted({"object": object, "colour": colour}.items()))
    return '{"place": "cave"}'


async def ask() -> None:
    agent = Agent("finder", model=model, model_settings=settings, tools=[find_object])
    run = Runner.run_streamed(agent, "Please find the yellow box.")
    async for _ in run.stream_events():
        pass
    print("answer", run.final_output)

    talker = Agent("talker", model=model, model_settings=settings)
    first = await Runner.run(talker, "My code word is silent-beaver-99. I will ask you later.")
    question = {"role": "user", "content": "Tell me the code word."}
    print("recall", (await Runner.run(talker, [*first.to_input_list(), question])).final_output)


asyncio.run(ask())
