"""instructor in its modes of tools, JSON and JSON schemas."""

import sys

import instructor
import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)  # the small model may end no text of JSON without spaces
    count: int


ASKED = [
    {
        "role": "user",
        "content": "Answer as JSON with name, count: My friend Nils lives in Oslo and has 12 pens.",
    }
]
server = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(server, mode=mode)
    made = client.chat.completions.create(
        model="baton-tiny", messages=ASKED, response_model=Person, temperature=0, max_retries=0
    )
    print("parsed", type(made).__name__)
