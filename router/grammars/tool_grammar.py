"""The grammar of an answer that consists of calls of tools, in the form of the model.

    required     call+                    one call alone, unless several are allowed
    strict       text (call+)?            a call that begins is valid to its end

The arguments follow the schema of their tool. A marker that is one token of the tokenizer is that
token. Knows forms and schemas; knows no request. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.text.call_form import CallForm
from baton.runtime.grammar.grammar_text import CALL_OPTIONS, inline_schema, quoted

TokenId = Callable[[str], int | None]
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """`schema` None: any object."""

    name: str
    schema: Mapping[str, Any] | None


def required_calls(
    form: CallForm, tools: Sequence[GrammarTool], parallel: bool, token: TokenId
) -> str:
    """Return a Lark grammar of one call, or more if `parallel`."""
    first, more = _heads(form, token)
    start = f"start: {first} call" + (f" ({more} call)*" if parallel and more else "")
    return "\n".join([start + _tail(form), *_rules(form, tools, token)])


def strict_calls(
    form: CallForm, tools: Sequence[GrammarTool], parallel: bool, token: TokenId
) -> str:
    """Return a Lark grammar of text, and calls after it. Where a form has no opening that ends the
    text, the answer is text, or calls from its start."""
    first, more = _heads(form, token)
    calls = f"{first} call" + (f" ({more} call)*" if parallel and more else "")
    calls += _tail(form)
    if token(form.opening) is not None and not form.bare:
        start = [f"start: TEXT ({calls})?", r"TEXT: /(.|\n)*/"]
    elif form.bare:
        start = [f"start: {calls} | TEXT", r"TEXT: /([^{](.|\n)*)?/"]
    else:
        start = [
            f"start: TEXT | text_and_opening {calls.removeprefix(first)}",
            f"text_and_opening[lazy]: /(.|\\n)*/ {quoted(form.opening)}",
            r"TEXT: /(.|\n)*/",
        ]
    return "\n".join([*start, *_rules(form, tools, token)])


def answer_or_calls(
    form: CallForm,
    tools: Sequence[GrammarTool],
    parallel: bool,
    token: TokenId,
    schema: dict[str, Any],
) -> str:
    """Return a Lark grammar of JSON that is valid by the schema, or of calls."""
    calls = required_calls(form, tools, parallel, token).replace("start:", "calls:", 1)
    return "\n".join(["start: answer | calls", f"answer: {inline_schema(schema)}", calls])


def _heads(form: CallForm, token: TokenId) -> tuple[str, str]:
    """Return what comes before the first call, and before each further one."""
    if form.bare:
        return "", quoted("; ")
    opening = _marker(form.opening, token)
    if form.listed:
        return f"{opening} {quoted('[')}", quoted(", ")
    return opening, f"{quoted(chr(10))} {opening}"


def _tail(form: CallForm) -> str:
    return f" {quoted(']')}" if form.listed else ""


def _rules(form: CallForm, tools: Sequence[GrammarTool], token: TokenId) -> list[str]:
    """Return the rules of a call: one for each tool, and one for its arguments."""
    space = quoted("\n") + " " if form.closing else ""
    closing = f" {space}{_marker(form.closing, token)}" if form.closing else ""
    arguments = "parameters" if form.bare else "arguments"
    names = " | ".join(f"call_{place}" for place in range(len(tools)))
    rules = [f"call: {space}({names}){closing}"]
    for place, tool in enumerate(tools):
        head = quoted(f'{{"name": "{tool.name}", "{arguments}": ')
        rules.append(f"call_{place}: {head} args_{place} {quoted('}')}")
        schema = dict(_ANY_OBJECT if tool.schema is None else tool.schema)
        value = inline_schema({"type": "object", **schema}, CALL_OPTIONS)
        rules.append(f"args_{place}: {value}")
    return rules


def _marker(text: str, token: TokenId) -> str:
    known = token(text)
    return quoted(text) if known is None else f"<[{known}]>"
