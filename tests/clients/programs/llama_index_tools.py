"""LlamaIndex: a function agent calls its tool; a chat of two turns streams."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def find_object(object: str, colour: str) -> str:
    """where an object is"""
    print("call", "find_object", sorted({"object": object, "colour": colour}.items()))
    return '{"place": "cave"}'


model = OpenAILike(
    model="baton-tiny",
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    temperature=0,
)
tool = FunctionTool.from_defaults(find_object, description="where an object is")
agent = FunctionAgent(tools=[tool], llm=model, initial_tool_choice=None)


async def ask() -> None:
    print("answer", await agent.run("Please find the yellow box."))


asyncio.run(ask())
talk = [ChatMessage("My code word is silent-beaver-99. I will ask you later.")]
talk.append(model.chat(talk).message)
talk.append(ChatMessage("Tell me the code word."))
print("recall", "".join(chunk.delta for chunk in model.stream_chat(talk)))
