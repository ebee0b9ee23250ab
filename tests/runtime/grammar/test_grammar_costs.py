"""What grammars cost is measured: compiling, masks, and the wait in a request's trace."""

from __future__ import annotations

from baton.proto import worker_pb2
from baton.runtime import metrics
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grammar.grammar_text import choice_grammar
from baton.runtime.telemetry import tracing
from tests.support.grammar_scene import small_vocabulary
from tests.support.trace_collector import ListeningCollector


def sample(name: str) -> float:
    return metrics.REGISTRY.get_sample_value(name) or 0.0


async def test_compiling_and_masks_are_counted() -> None:
    vocabulary = small_vocabulary()
    compiler = GrammarCompiler(vocabulary, threads=False)
    message = worker_pb2.Grammar(text=choice_grammar(["yes"]), vocabulary=vocabulary.digest)
    names = ("baton_grammar_compile_seconds_count", "baton_masks_total")
    before = [sample(name) for name in names]
    seconds = sample("baton_mask_seconds_total")
    for _ in range(2):  # compiled, then kept
        grammar = await compiler.compiled(message)
    masks = compiler.masks(message, grammar, [])
    for _ in range(3):
        assert masks.mask(start=True).bitmask()
    assert [sample(name) for name in names] == [before[0] + 1, before[1] + 3]
    assert sample("baton_mask_seconds_total") > seconds
    compiler.close()


async def test_wait_for_a_grammar_is_a_span(collector: ListeningCollector) -> None:
    servicer, endpoint = collector
    tracing.setup("decode", endpoint)
    vocabulary = small_vocabulary()
    compiler = GrammarCompiler(vocabulary, threads=False)
    message = worker_pb2.Grammar(text=choice_grammar(["no"]), vocabulary=vocabulary.digest)
    with tracing.span(tracing.REQUEST) as request:
        await compiler.compiled(message, request)
    tracing.shutdown()
    spans = servicer.spans
    assert spans["compile_grammar"].parent_span_id == spans["request"].span_id
    compiler.close()
