"""LlamaIndex: structured output by a call of a tool, and by a JSON schema."""

import sys

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)  # the small model may end no text of JSON without spaces
    count: int


ASKED = [
    ChatMessage("Answer as JSON with name, count: My friend Nils lives in Oslo and has 12 pens.")
]
for by_schema in (False, True):
    model = OpenAILike(
        model="baton-tiny",
        api_base=f"{sys.argv[1]}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=not by_schema,
        should_use_structured_outputs=by_schema,
        context_window=2048,
        temperature=0,
    )
    print("parsed", type(model.as_structured_llm(Person).chat(ASKED).raw).__name__)
