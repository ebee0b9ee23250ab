"""The masks of one choice, along tokens that are accepted, proposed, rejected, or read again."""

from __future__ import annotations

import pytest

from baton.runtime.grammar.choice_masks import (
    MAX_OWN_MATCHERS,
    ChoiceMasks,
    InlineMasks,
    Reasoning,
)
from baton.runtime.grammar.grammar_text import json_schema_grammar
from baton.runtime.grammar.matcher import CompiledGrammar, compile_grammar
from tests.support.grammar_scene import (
    CLOSING,
    END,
    OPENING,
    TOKENS,
    admitted,
    costly_grammar,
    small_vocabulary,
    tokens_of,
)

VOCABULARY = small_vocabulary()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def grammar() -> CompiledGrammar:
    return compile_grammar(json_schema_grammar(SCHEMA), VOCABULARY)


def masks(grammar: CompiledGrammar, output: list[int], reasoning: Reasoning | None = None):
    return ChoiceMasks(grammar, output, InlineMasks(), reasoning)


def expected(grammar: CompiledGrammar, text: str) -> set[int]:
    matcher = grammar.matcher()
    assert matcher.consume(tokens_of(text)) == len(text)
    return admitted(matcher.bitmask())


def test_masks_follow_the_accepted_tokens(grammar: CompiledGrammar) -> None:
    output: list[int] = []
    following = masks(grammar, output)
    for index, token in enumerate(tokens_of('{"a":12}')):
        assert admitted(following.mask(start=True).bitmask()) == expected(
            grammar, '{"a":12}'[:index]
        )
        output.append(token)
    assert admitted(following.mask(start=True).bitmask()) == {END}


def test_a_rebuilt_matcher_has_the_same_masks(grammar: CompiledGrammar) -> None:
    output = tokens_of('{"a":1')
    rebuilt = masks(grammar, output)
    assert admitted(rebuilt.mask(start=True).bitmask()) == expected(grammar, '{"a":1')


def test_each_row_of_proposals_has_its_own_mask(grammar: CompiledGrammar) -> None:
    output = tokens_of('{"a')
    base = masks(grammar, output).mask(start=True)
    proposals = tokens_of('":7')
    rows = [base.extended(proposals[:row]) for row in range(1, 4)]
    for row in (3, 1, 2):  # in whatever order they are awaited
        assert admitted(rows[row - 1].bitmask()) == expected(grammar, '{"a":7'[: 3 + row])


def test_rejected_proposals_leave_nothing_behind(grammar: CompiledGrammar) -> None:
    output = tokens_of('{"a":')
    following = masks(grammar, output)
    wrong = following.mask(start=True).extended(tokens_of("12}"))
    assert admitted(wrong.bitmask()) == {END}
    output.append(ord("5"))
    assert admitted(following.mask(start=True).bitmask()) == expected(grammar, '{"a":5')


def test_a_proposal_outside_the_grammar_has_no_mask_behind_it(grammar: CompiledGrammar) -> None:
    output = tokens_of('{"a":')
    following = masks(grammar, output)
    base = following.mask(start=True)
    assert ord("x") not in admitted(base.bitmask())
    assert base.extended(tokens_of("x")).bitmask() is None
    assert not following.error
    assert admitted(following.mask(start=True).bitmask()) == expected(grammar, '{"a":')


def test_behind_an_end_token_there_is_no_mask(grammar: CompiledGrammar) -> None:
    base = masks(grammar, tokens_of('{"a":1}')).mask(start=True)
    assert base.extended([END]).bitmask() is None
    assert admitted(base.bitmask()) == {END}


def test_the_mask_begins_after_opened_reasoning(grammar: CompiledGrammar) -> None:
    output: list[int] = []
    following = masks(grammar, output, Reasoning(OPENING, CLOSING, opened=True))
    for token in [*tokens_of("so {"), CLOSING]:
        assert following.mask(start=True).bitmask() is None
        output.append(token)
    assert admitted(following.mask(start=True).bitmask()) == expected(grammar, "")
    output += tokens_of('{"a":')
    assert admitted(following.mask(start=True).bitmask()) == expected(grammar, '{"a":')


def test_an_output_may_begin_with_reasoning_or_the_answer(grammar: CompiledGrammar) -> None:
    reasoning = Reasoning(OPENING, CLOSING, opened=False)
    first = admitted(masks(grammar, [], reasoning).mask(start=True).bitmask())
    assert first == expected(grammar, "") | {OPENING}
    thinking = masks(grammar, [OPENING, *tokens_of("hm")], reasoning)
    assert thinking.mask(start=True).bitmask() is None
    answering = masks(grammar, tokens_of('{"a'), reasoning)
    assert admitted(answering.mask(start=True).bitmask()) == expected(grammar, '{"a')


def test_reasoning_may_end_within_proposals(grammar: CompiledGrammar) -> None:
    output = tokens_of("so")
    following = masks(grammar, output, Reasoning(OPENING, CLOSING, opened=True))
    base = following.mask(start=True)
    inside = base.extended([CLOSING, *tokens_of('{"a')])
    assert admitted(inside.bitmask()) == expected(grammar, '{"a')
    output.append(ord("x"))  # the proposals were rejected
    assert following.mask(start=True).bitmask() is None


def test_every_token_can_be_asked_for(grammar: CompiledGrammar) -> None:
    following = masks(grammar, [])
    base = following.mask(start=True)
    first = admitted(base.bitmask())
    for token in range(len(TOKENS)):
        assert base.extended([token]).bitmask() is not None or token not in first


FIRST = {ord("o"), *range(ord("p"), ord("z") + 1)}


@pytest.mark.parametrize("length", range(4))
def test_an_error_behind_rejected_proposals_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Its matcher is replaced, and the new one consumes the whole output."""
    output: list[int] = []
    following = masks(costly_grammar(monkeypatch), output)
    failing = following.mask(start=True).extended(tokens_of("x"))
    assert failing.bitmask() is None and following.error is None
    output += tokens_of("ok1")[:length]
    wanted = [FIRST, {ord("k")}, {ord("1")}, {END}][length]
    assert admitted(following.mask(start=True).bitmask()) == wanted
    assert following.error is None


def test_an_error_counts_once_the_output_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[int] = []
    following = masks(costly_grammar(monkeypatch), output)
    base = following.mask(start=True)
    rows = [base.extended(tokens_of("xab")[:row]) for row in (2, 1, 3)]  # in any order
    assert [row.bitmask() for row in rows] == [None] * 3
    assert following.mask(start=True).bitmask() is not None and following.error is None
    output.append(ord("x"))
    assert "lexer error" in str(following.error)
    output.append(ord("a"))
    assert following.error and following.mask(start=True).bitmask() is None


def test_an_error_ahead_of_the_output_has_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are computed for a step that follows one whose tokens are not accepted yet."""
    output: list[int] = []
    following = masks(costly_grammar(monkeypatch), output)
    base = following.mask(start=True)
    ahead = base.extended(tokens_of("x"))
    assert ahead.bitmask() is None and following.error is None
    assert ahead.extended(tokens_of("a")).bitmask() is None  # the step after it
    assert base.extended(tokens_of("o")).bitmask() is not None
    output += tokens_of("x")
    assert following.error


def test_an_error_of_one_output_fails_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of a compiled grammar share a lexer, which stays in its error: they are replaced."""
    grammar = costly_grammar(monkeypatch)
    other = masks(grammar, tokens_of("o"))
    for _ in range(2):
        failing = masks(grammar, tokens_of("x"))
        assert failing.mask(start=True).bitmask() is None and failing.error
        for each in (other, masks(grammar, tokens_of("o"))):
            assert admitted(each.mask(start=True).bitmask()) == {ord("k")} and each.error is None


def test_errors_behind_proposals_replace_few_matchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after these counts where the next mask is wanted."""
    following = masks(costly_grammar(monkeypatch), [])
    for count in range(MAX_OWN_MATCHERS):
        assert following.mask(start=True).bitmask() is not None and following.error is None
        assert following.mask(start=True).extended([ord("p") + count]).bitmask() is None
    assert following.mask(start=True).bitmask() is None and following.error
