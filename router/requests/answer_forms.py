"""The form of one model's answers: whether they begin with reasoning, and the grammars they follow.

Knows the tokenizer's marks and the process that validates grammars. Owned by the validator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from baton.proto import worker_pb2
from baton.router.grammars.constraint import Constraint
from baton.router.grammars.grammar_validator import GrammarValidator
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.templates.chat_template import ChatTemplate
from baton.router.text.harmony import CHANNEL, END, MESSAGE, START, HarmonyForm
from baton.router.text.reasoning import AnswerReasoning, ReasoningForm
from baton.router.text.tokenizer import Tokenizer
from baton.runtime.errors import InvalidRequest

TAIL_TOKENS = 16  # of a prompt, in which white space follows its last mark
_MARKS = (("<think>", "</think>"),)  # of Qwen3, DeepSeek-R1 and GLM


def reasoning_form(
    template: ChatTemplate | None, tokenizer: Tokenizer
) -> ReasoningForm | HarmonyForm | None:
    """Return the marks around reasoning that the template prints, if each is one token."""
    if template is not None and f"{CHANNEL}final{MESSAGE}" in template.literals:
        marks = [tokenizer.token_id(mark) for mark in (START, CHANNEL, MESSAGE, END)]
        if None not in marks:
            return HarmonyForm(*(mark for mark in marks if mark is not None))
    for opening, closing in _MARKS:
        if template is None or closing not in template.literals:
            continue
        first, last = tokenizer.token_id(opening), tokenizer.token_id(closing)
        if first is not None and last is not None:
            return ReasoningForm(opening, closing, first, last)
    return None


class AnswerForms:
    """`has_end`: the model has an end token, without which no grammar can end."""

    def __init__(
        self,
        model: str,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        grammars: GrammarValidator | None,
        *,
        has_end: bool,
    ) -> None:
        self._model = model
        self._form = reasoning_form(template, tokenizer)
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._has_end = has_end

    def reasoning(self, prompt: Sequence[int], shown: bool) -> AnswerReasoning | None:
        """Return how an answer to this prompt reasons; None for a model that does not. Only a mark
        at the prompt's end opens reasoning: others are a message's text."""
        if self._form is None:
            return None
        if isinstance(self._form, HarmonyForm):
            return AnswerReasoning(self._form, False, shown)
        last = next((each for each in reversed(prompt[-TAIL_TOKENS:]) if self._is_text(each)), None)
        return AnswerReasoning(self._form, last == self._form.opening_token, shown)

    def _is_text(self, token: int) -> bool:
        """Return whether the token is more than white space."""
        return bool(self._tokenizer.decode([token], skip_special_tokens=False).strip())

    async def constrained(
        self,
        request: ValidatedRequest,
        constraint: Constraint | None,
        reasoning: AnswerReasoning | None = None,
    ) -> ValidatedRequest:
        """Return the request with its grammar, which begins after the reasoning. Raises
        InvalidRequest if no grammar can be made of the constraint."""
        if constraint is not None:
            form = None if reasoning is None else reasoning.form
            if isinstance(form, HarmonyForm):
                envelope = form.envelope(whole=constraint.whole)
                constraint = replace(constraint, envelope=envelope)
            started_s = time.time()
            grammar = await self._grammar(constraint)
            request = replace(request, grammar_wall_s=(started_s, time.time()))
            if reasoning is not None and isinstance(form, ReasoningForm):
                grammar.reasoning.CopyFrom(
                    worker_pb2.Reasoning(
                        opening=form.opening_token,
                        closing=form.closing_token,
                        opened=reasoning.opened,
                    )
                )
            request.sampling.grammar.CopyFrom(grammar)
        return replace(request, reasoning=reasoning)

    async def _grammar(self, constraint: Constraint) -> worker_pb2.Grammar:
        if self._grammars is None or not self._has_end:
            raise InvalidRequest(
                f"{constraint.field}: the model {self._model!r} names no end token, so no answer "
                "can be constrained: leave it out",
                constraint.field,
            )
        return await self._grammars.grammar(constraint)
