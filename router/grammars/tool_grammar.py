"""The grammar of an answer that consists of calls of tools, in the form of the model.

    required     call+                    one call alone, unless several are allowed
    strict       text (call+)?            a call that begins is valid to its end

The arguments follow the schema of their tool. A marker that is one token of the tokenizer is that
token. Knows forms and schemas; knows no request. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.grammars.lark_text import (
    ANYTHING,
    GrammarRules,
    GrammarTool,
    TokenId,
    regex,
    spelled,
)
from baton.router.grammars.markup_grammar import markup_rules
from baton.router.text.call_form import CallForm
from baton.router.text.json_call import JsonForm
from baton.router.text.markup_call import MarkupForm
from baton.router.text.named_call import NamedForm
from baton.runtime.grammar.grammar_text import CALL_OPTIONS, inline_schema, quoted

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallRules:
    """A form as parts of a Lark grammar: `rules` define `call`. The text `opening` comes before the
    first call, `inside` follows it. `between` two calls; None: there is one at most. `answer`
    stands before an answer that is no call."""

    rules: list[str]
    opening: str = ""
    inside: str = ""
    between: str | None = None
    last: str = ""
    answer: str = ""

    def calls(self, opening: str, parallel: bool) -> str:
        more = f"({self.between} call)*" if parallel and self.between is not None else ""
        return f"{opening} {self.inside} call {more} {self.last}"

    def text(self, start: Sequence[str]) -> str:
        """Return the whole grammar."""
        return "\n".join([*start, *self.rules])


def required_calls(
    form: CallForm, tools: Sequence[GrammarTool], parallel: bool, token: TokenId
) -> str:
    """Return a Lark grammar of one call, or more if `parallel`."""
    rules = _rules(form, tools, token)
    opening = spelled(rules.opening, form.markers, token)
    return rules.text([f"start: {rules.calls(opening, parallel)}"])


def strict_calls(
    form: CallForm, tools: Sequence[GrammarTool], parallel: bool, token: TokenId
) -> str:
    """Return a Lark grammar of text, and calls after it. Where a form has no opening that ends the
    text, the answer is text, or calls from its start."""
    rules = _rules(form, tools, token)
    opening = spelled(rules.opening, form.markers, token)
    calls = rules.calls(opening, parallel)
    texts = [each for each in form.openings if token(each) is None]
    without = "".join(f" & ~({ANYTHING} {quoted(each)} {ANYTHING})" for each in texts)
    if form.bare:
        start = [f"start: {calls} | TEXT", rf"TEXT: /([^{{](.|\n)*)?/{without}"]
    elif not rules.opening:
        start = [f"start: {rules.answer} TEXT | {calls}", f"TEXT: {ANYTHING}{without}"]
    elif token(rules.opening) is not None:
        start = [f"start: TEXT ({calls})?", f"TEXT: {ANYTHING}{without}"]
    else:
        others = "".join(
            f" & ~({ANYTHING} {quoted(each)} {ANYTHING})" for each in texts if each != rules.opening
        )
        once = f" & ~({ANYTHING} {opening} {regex('.+')})"
        start = [
            f"start: TEXT | TEXT_AND_OPENING {rules.calls('', parallel)}",
            f"TEXT_AND_OPENING: ({ANYTHING} {opening}){once}{others}",
            f"TEXT: {ANYTHING}{without}",
        ]
    return rules.text(start)


def answer_or_calls(
    form: CallForm,
    tools: Sequence[GrammarTool],
    parallel: bool,
    token: TokenId,
    schema: dict[str, Any],
) -> str:
    """Return a Lark grammar of JSON that is valid by the schema, or of calls."""
    rules = _rules(form, tools, token)
    opening = spelled(rules.opening, form.markers, token)
    start = ["start: answer | calls", f"answer: {rules.answer} json"]
    start += [f"json: {inline_schema(schema)}", f"calls: {rules.calls(opening, parallel)}"]
    return rules.text(start)


def _rules(form: CallForm, tools: Sequence[GrammarTool], token: TokenId) -> CallRules:
    if isinstance(form, MarkupForm):
        opening = form.openings[0]
        between = f"{quoted(chr(10))} {spelled(opening, form.markers, token)}"
        return CallRules(markup_rules(form, tools, token), opening, between=between)
    if isinstance(form, NamedForm):
        return _named_rules(form, tools, token)
    if isinstance(form, JsonForm):
        return _json_rules(form, tools, token)
    raise TypeError(f"no grammar is known for {type(form).__name__}")


def _json_rules(form: JsonForm, tools: Sequence[GrammarTool], token: TokenId) -> CallRules:
    space = quoted("\n") if form.closing else ""
    closing = f"{space} {spelled(form.closing, form.markers, token)}"
    arguments = "parameters" if form.bare else "arguments"
    rules = [f"call: {space} ({_choice(tools)}) {closing}"]
    for index, tool in enumerate(tools):
        # each sign apart: an answer in JSON beside the calls begins alike
        parts = ("{", '"name"', ": ", f'"{tool.name}"', ", ", f'"{arguments}"', ": ")
        head = " ".join(map(quoted, parts))
        rules.append(f"call_{index}: {head} args_{index} {quoted('}')}")
    rules += _argument_rules(tools)
    if form.bare:
        return CallRules(rules, between=quoted("; "))
    if form.listed:
        bracket, comma = quoted("["), quoted(", ")
        return CallRules(rules, form.opening, bracket, comma, last=quoted("]"))
    between = f"{quoted(chr(10))} {spelled(form.opening, form.markers, token)}"
    return CallRules(rules, form.opening, between=between)


def _named_rules(form: NamedForm, tools: Sequence[GrammarTool], token: TokenId) -> CallRules:
    written = form.written

    def text(each: str) -> str:
        return spelled(each, form.markers, token)

    rules = [f"call: {_choice(tools)}"]
    for index, tool in enumerate(tools):
        head = text(f"{written.before_name}{tool.name}{written.before_arguments}")
        rules.append(f"call_{index}: {head} args_{index} {text(written.after_arguments)}")
    return CallRules(
        rules + _argument_rules(tools),
        written.first,
        between=None if written.between is None else text(written.between),
        last=text(written.last),
        answer=text(written.answer),
    )


def _choice(tools: Sequence[GrammarTool]) -> str:
    return " | ".join(f"call_{index}" for index in range(len(tools)))


def _argument_rules(tools: Sequence[GrammarTool]) -> list[str]:
    rules = GrammarRules()
    for index, tool in enumerate(tools):
        schema = dict(_ANY_OBJECT if tool.free or tool.schema is None else tool.schema)
        value = inline_schema({"type": "object", **schema}, CALL_OPTIONS)
        rules.add(f"args_{index}: {value}", tool)
    return rules.lines
