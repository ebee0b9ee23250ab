"""Third-party clients, unchanged: each calls a tool, sends its result back, and recalls a word in a
second turn, with whatever fields it adds to what it was sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

REPORTED = ("call ", "answer ", "recall ")  # by the programs; clients print remarks beside it
EXPECTED = """\
call find_object [('colour', 'yellow'), ('object', 'box')]
answer The yellow box is in the cave.
recall The code word is silent-beaver-99.
"""


# Of third-party clients `make test` runs test_structured.py.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("environment", "program"),
    [
        ("openai3", "agents_sdk_tools.py"),
        ("openai2", "litellm_chat.py"),
        ("openai2", "llama_index_tools.py"),
        ("openai3", "langchain_tools.py"),
        ("openai3", "pydantic_ai_tools.py"),
    ],
)
def test_agent_calls_its_tool_and_recalls(
    run_client: Callable[..., str], environment: str, program: str
) -> None:
    lines = run_client(environment, program).splitlines(keepends=True)
    assert "".join(line for line in lines if line.startswith(REPORTED)) == EXPECTED
