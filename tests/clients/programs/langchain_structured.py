"""LangChain's three methods of `with_structured_output`; JSON mode has no schema."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)  # the small model may end no text of JSON without spaces
    count: int


ASKED = "Answer as JSON with name, count: My friend Nils lives in Oslo and has 12 pens."
model = ChatOpenAI(model="baton-tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0)
for method, strict in (
    ("json_schema", True),
    ("function_calling", None),
    ("function_calling", True),
):
    structured = model.with_structured_output(Person, method=method, strict=strict)
    print("parsed", type(structured.invoke(ASKED)).__name__)
print("parsed", type(model.with_structured_output(None, method="json_mode").invoke(ASKED)).__name__)
