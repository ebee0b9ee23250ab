"""Reads the constraint of an answer from its request's fields.

Three fields ask for one: `response_format`, `structured_outputs`, and tools that are strict or
required. Two constraints at once are refused by name. Knows no grammar. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.router.grammars.constraint import Constraint
from baton.router.grammars.lark_text import GrammarTool, TokenId
from baton.router.grammars.tool_grammar import (
    answer_or_calls,
    required_calls,
    strict_calls,
)
from baton.router.requests.constraint_schema import ResponseFormat, StructuredOutputs
from baton.router.requests.openai_schema import ChatRequest, GenerationBody, NamedTool, Tool
from baton.router.text.call_form import CallableTools
from baton.runtime.errors import InvalidRequest

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def output_constraint(request: GenerationBody) -> Constraint | None:
    """Return what `response_format` or `structured_outputs` ask for. Raises InvalidRequest where
    both do, or one names no constraint."""
    by_format = _of_format(request.response_format)
    by_name = _of_structured(request.structured_outputs)
    if by_format is not None and by_name is not None:
        raise InvalidRequest(
            "structured_outputs and response_format both constrain the answer: give one",
            "structured_outputs",
        )
    return by_format or by_name


def chat_constraint(
    request: ChatRequest, calling: CallableTools | None, token: TokenId
) -> Constraint | None:
    """Return what the fields of `output_constraint`, `tool_choice` and strict tools ask for; beside
    a constrained answer the model may call its tools. Raises InvalidRequest for a choice that names
    no tool of the request, that needs a form of calls which is not known, or that leaves no room
    for the constrained answer."""
    answer = output_constraint(request)
    choice, tools = request.tool_choice, request.tools or ()
    forced = choice == "required" or isinstance(choice, NamedTool)
    if forced and not tools:
        raise InvalidRequest("tool_choice: there are no tools: add some", "tool_choice")
    if calling is None:
        if forced:
            raise InvalidRequest(
                "tool_choice: the router reads no calls of this model (router.tool_calls is none): "
                'give "auto"',
                "tool_choice",
            )
        return answer
    if answer is not None and (forced or answer.kind != "json_schema"):
        raise InvalidRequest(
            f"{answer.field} and tool_choice or tools both constrain the answer: give one",
            answer.field,
        )
    chosen = _chosen(tools, choice) if isinstance(choice, NamedTool) else tools
    parallel = calling.parallel and not isinstance(choice, NamedTool)
    strict = any(tool.function.strict for tool in chosen)
    given = [
        GrammarTool(
            tool.function.name,
            tool.function.parameters,
            free=not forced and not tool.function.strict,
        )
        for tool in chosen
    ]
    if answer is not None:
        text = answer_or_calls(calling.form, given, parallel, token, answer.body)
        return Constraint("lark", text, answer.field, whole=True)
    if forced or strict:
        made = required_calls if forced else strict_calls
        text = made(calling.form, given, parallel, token)
        return Constraint("lark", text, "tools", whole=True)
    return None


def _chosen(tools: Sequence[Tool], choice: NamedTool) -> Sequence[Tool]:
    found = [tool for tool in tools if tool.function.name == choice.function.name]
    if not found:
        raise InvalidRequest(
            f"tool_choice.function.name: there is no tool {choice.function.name!r} in tools: name "
            "one of them",
            "tool_choice.function.name",
        )
    return found


def _of_format(given: ResponseFormat | None) -> Constraint | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Constraint("json_schema", _ANY_OBJECT, "response_format")
    if given.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is missing: add it", "response_format.json_schema"
        )
    field = "response_format.json_schema.schema"
    schema = given.json_schema.schema_
    return Constraint("json_schema", _ANY_OBJECT if schema is None else schema, field)


def _of_structured(given: StructuredOutputs | None) -> Constraint | None:
    if given is None:
        return None
    asked: list[Constraint] = []
    if given.json_ is not None:
        asked.append(Constraint("json_schema", given.json_, "structured_outputs.json"))
    if given.json_object:
        asked.append(Constraint("json_schema", _ANY_OBJECT, "structured_outputs.json_object"))
    if given.regex is not None:
        asked.append(Constraint("regex", given.regex, "structured_outputs.regex"))
    if given.choice is not None:
        asked.append(Constraint("choice", given.choice, "structured_outputs.choice"))
    if given.grammar is not None:
        asked.append(Constraint("grammar", given.grammar, "structured_outputs.grammar"))
    if len(asked) > 1:
        names = " and ".join(each.field for each in asked[:2])
        raise InvalidRequest(f"{names} both constrain the answer: give one", asked[1].field)
    return asked[0] if asked else None
