"""LiteLLM: a tool's call comes back from a stream, its result is sent, and a chat of two turns."""

import json
import sys

import litellm

SERVER = {"model": "openai/baton-tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
FIND_OBJECT = {
    "type": "function",
    "function": {
        "name": "find_object",
        "description": "where an object is",
        "parameters": {
            "type": "object",
            "properties": {"object": {"type": "string"}, "colour": {"type": "string"}},
            "required": ["object", "colour"],
        },
    },
}

messages = [{"role": "user", "content": "Please find the yellow box."}]
for stream in (True, False):
    answer = litellm.completion(
        messages=messages, tools=[FIND_OBJECT], temperature=0, stream=stream, **SERVER
    )
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message.model_dump())  # with all that LiteLLM adds to it
    for call in message.tool_calls or ():
        print("call", call.function.name, sorted(json.loads(call.function.arguments).items()))
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"place": "cave"}'}
        messages.append(result)
print("answer", messages[-1]["content"])

talk = []
for text in ("My code word is silent-beaver-99. I will ask you later.", "Tell me the code word."):
    talk.append({"role": "user", "content": text})
    answer = litellm.completion(messages=talk, temperature=0, **SERVER)
    talk.append(answer.choices[0].message)
print("recall", talk[-1].content)
