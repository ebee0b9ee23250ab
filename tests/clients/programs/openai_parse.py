"""The official client's `parse()`: an answer, streamed and not, and a call, as pydantic models."""

import sys

import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)  # the small model may end no text of JSON without spaces
    count: int


class Find(BaseModel):
    """where an object is"""

    object: str = Field(max_length=20)
    colour: str = Field(max_length=20)


def shape(made: BaseModel) -> str:
    return f"parsed {type(made).__name__}"


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
ASKED = "Answer as JSON with name, count: My friend Nils lives in Oslo and has 12 pens."
FIELDS = {
    "model": "baton-tiny",
    "messages": [{"role": "user", "content": ASKED}],
    "temperature": 0,
    "response_format": Person,
}
print(shape(client.chat.completions.parse(**FIELDS).choices[0].message.parsed))
with client.chat.completions.stream(**FIELDS) as stream:
    print(shape(stream.get_final_completion().choices[0].message.parsed))

called = client.chat.completions.parse(
    model="baton-tiny",
    messages=[{"role": "user", "content": "Please find the yellow box."}],
    temperature=0,
    tools=[openai.pydantic_function_tool(Find, name="find_object")],
    tool_choice="required",
)
for call in called.choices[0].message.tool_calls:
    print(shape(call.function.parsed_arguments))
