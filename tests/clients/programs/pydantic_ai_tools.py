"""pydantic-ai: an agent calls its tool, and goes on with the history of an earlier run."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
model = OpenAIChatModel("baton-tiny", provider=provider, settings={"temperature": 0})
agent = Agent(model)


@agent.tool_plain
def find_object(object: str, colour: str) -> str:
    """where an object is"""
    print("call", "find_object", sorted({"object": object, "colour": colour}.items()))
    return '{"place": "cave"}'


print("answer", agent.run_sync("Please find the yellow box.").output)

talker = Agent(model)
first = talker.run_sync("My code word is silent-beaver-99. I will ask you later.")
second = talker.run_sync("Tell me the code word.", message_history=first.all_messages())
print("recall", second.output)
