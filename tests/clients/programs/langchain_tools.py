"""LangChain: a bound tool is called, its result is sent back, and the answer uses it; a chat of two
turns streams."""

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def find_object(object: str, colour: str) -> str:
    """where an object is"""
    return '{"place": "cave"}'


model = ChatOpenAI(model="baton-tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0)
with_tools = model.bind_tools([find_object])
messages = [HumanMessage("Please find the yellow box.")]
for _ in range(2):
    # streamed, and put together again from its chunks, as agents do
    answer = AIMessageChunk("")
    for chunk in with_tools.stream(messages):
        answer = answer + chunk
    messages.append(answer)
    for call in answer.tool_calls:
        print("call", call["name"], sorted(call["args"].items()))
        messages.append(ToolMessage(find_object.invoke(call["args"]), tool_call_id=call["id"]))
print("answer", messages[-1].content)

talk = [HumanMessage("My code word is silent-beaver-99. I will ask you later.")]
talk.append(model.invoke(talk))
talk.append(HumanMessage("Tell me the code word."))
print("recall", "".join(chunk.content for chunk in model.stream(talk)))
