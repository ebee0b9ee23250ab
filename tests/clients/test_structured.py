"""Third-party clients, unchanged, get structured output: by schemas, by JSON mode, and by calls of
tools that they force."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def reported(printed: str) -> list[str]:
    """What a program reports; clients print remarks beside it."""
    return [line for line in printed.splitlines() if line.startswith(("parsed ", "called "))]


@pytest.mark.parametrize(
    ("environment", "program", "expected"),
    [
        ("openai3", "openai_parse.py", ["Person", "Person", "Find"]),
        pytest.param("openai2", "instructor_models.py", ["Person"] * 3, marks=pytest.mark.nightly),
        pytest.param(
            "openai3",
            "langchain_structured.py",
            ["Person", "Person", "Person", "dict"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "openai2", "llama_index_structured.py", ["Person"] * 2, marks=pytest.mark.nightly
        ),
    ],
)
def test_client_gets_objects_of_its_schema(
    run_client: Callable[..., str], environment: str, program: str, expected: list[str]
) -> None:
    found = reported(run_client(environment, program))
    assert found == [f"parsed {name}" for name in expected]


@pytest.mark.nightly
def test_vercel_ai_sdk_generates_objects_and_calls(run_client: Callable[..., str]) -> None:
    found = reported(run_client("vercel", "vercel_ai.mjs"))
    assert found == ["parsed string number"] * 2 + ["called find_object colour,object"]
