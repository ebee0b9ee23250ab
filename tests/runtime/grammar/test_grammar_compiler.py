"""What the compiler keeps: grammars that it has compiled or refused, and no accident."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.proto import worker_pb2
from baton.runtime import metrics
from baton.runtime.errors import EngineError, InvalidRequest
from baton.runtime.grammar import grammar_compiler
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grammar.grammar_text import choice_grammar, regex_grammar
from baton.runtime.grammar.matcher import CompiledGrammar, compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary
from tests.support.grammar_scene import RustPanic, small_vocabulary
from tests.support.metric_values import metric_value

VOCABULARY = small_vocabulary()


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(VOCABULARY)
    yield made
    made.close()


def message(text: str) -> worker_pb2.Grammar:
    return worker_pb2.Grammar(text=text, vocabulary=VOCABULARY.digest)


@pytest.mark.parametrize("accident", [MemoryError(), RustPanic("index out of bounds")])
async def test_a_failed_compilation_is_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, accident: BaseException
) -> None:
    accidents = [accident]

    def fails_once(text: str, vocabulary: Vocabulary) -> CompiledGrammar:
        if accidents:
            raise accidents.pop()
        return compile_grammar(text, vocabulary)

    monkeypatch.setattr(grammar_compiler, "compile_grammar", fails_once)
    wanted = message(choice_grammar(["yes"]))
    with pytest.raises(EngineError, match=type(accident).__name__):
        await compiler.compiled(wanted)
    assert await compiler.compiled(wanted) is await compiler.compiled(wanted)


async def test_an_invalid_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    before = metric_value(metrics.GRAMMARS_COMPILED)
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await compiler.compiled(message(regex_grammar("(a")))
    assert metric_value(metrics.GRAMMARS_COMPILED) - before == 1
