"""Compiles the grammars of requests, each once, off the event loop.

The router has validated a grammar; a worker compiles it again under the same limits, because it
trusts no message. Compiled grammars are kept by their text, the least recently used are forgotten.
Owns the threads; `close` ends them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.runtime import metrics
from baton.runtime.errors import BatonError, EngineError, InvalidRequest, Unavailable
from baton.runtime.grammar.choice_masks import ChoiceMasks, InlineMasks, MaskThreads, Reasoning
from baton.runtime.grammar.matcher import MAX_GRAMMAR_BYTES, CompiledGrammar, compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary
from baton.runtime.telemetry import tracing

KEPT_GRAMMARS = 64
MASK_THREADS = 2


class GrammarCompiler:
    """`vocabulary` is None on a worker whose model folder has no tokenizer: it refuses grammars.
    Without `threads` all is done where it is called."""

    def __init__(self, vocabulary: Vocabulary | None, *, threads: bool = True) -> None:
        self._vocabulary = vocabulary
        self._kept: OrderedDict[str, asyncio.Future[CompiledGrammar]] = OrderedDict()
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None
        self._threads = threads

    @property
    def digest(self) -> bytes:
        """Names the vocabulary; empty without one."""
        return self._vocabulary.digest if self._vocabulary else b""

    def check(self, message: worker_pb2.Grammar) -> None:
        """Raise what is wrong with the message before anything is compiled: Unavailable for another
        vocabulary, which another worker may have, InvalidRequest for a value out of range."""
        if self._vocabulary is None or message.vocabulary != self._vocabulary.digest:
            raise Unavailable(
                "this worker's tokenizer.json is missing or differs from the router's: give "
                "routers and workers the same model folder"
            )
        if len(message.text) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the grammar has {len(message.text)} characters, over {MAX_GRAMMAR_BYTES}"
            )
        tokens = message.reasoning.opening, message.reasoning.closing
        if message.HasField("reasoning") and max(tokens) >= self._vocabulary.size:
            raise InvalidRequest("the tokens of reasoning are outside the vocabulary")

    async def compiled(
        self, message: worker_pb2.Grammar, trace: Context | None = None
    ) -> CompiledGrammar:
        """Return the grammar, compiled now or before; a span under `trace` shows the wait. Raises
        the same as `check`, InvalidRequest if the grammar is invalid or over the limits, and
        EngineError if it could not be compiled, which the next request tries again."""
        self.check(message)
        found = self._kept.get(message.text)
        known = found is not None
        if found is None:
            metrics.GRAMMARS_COMPILED.inc()
            found = self._kept[message.text] = self._start(message.text)
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(message.text)
        with tracing.span(tracing.COMPILE, trace, known=known):
            return await asyncio.shield(found)  # bounded by the limits

    def masks(
        self, message: worker_pb2.Grammar, grammar: CompiledGrammar, output: Sequence[int]
    ) -> ChoiceMasks:
        """Return the masks of one choice, which has this output already."""
        reasoning = None
        if message.HasField("reasoning"):
            given = message.reasoning
            reasoning = Reasoning(given.opening, given.closing, given.opened)
        return ChoiceMasks(grammar, output, self._mask_threads(), reasoning)

    def _start(self, text: str) -> asyncio.Future[CompiledGrammar]:
        assert self._vocabulary is not None
        loop = asyncio.get_running_loop()
        if self._threads:
            if self._compiling is None:
                self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            made = loop.run_in_executor(self._compiling, _measured, text, self._vocabulary)
        else:
            made = loop.create_future()
            try:
                made.set_result(_measured(text, self._vocabulary))
            except BatonError as error:
                made.set_exception(error)
        made.add_done_callback(partial(self._forget_failed, text))
        return made

    def _forget_failed(self, text: str, over: asyncio.Future[CompiledGrammar]) -> None:
        """Keep a grammar that was compiled or is invalid, and no other outcome."""
        failure = over.cancelled() or over.exception()
        if failure and not isinstance(failure, InvalidRequest) and self._kept.get(text) is over:
            del self._kept[text]

    def _mask_threads(self) -> MaskThreads:
        if not self._threads:
            return InlineMasks()
        if self._masking is None:
            self._masking = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="mask")
        return self._masking

    def close(self) -> None:
        for threads in (self._compiling, self._masking):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)


def _measured(text: str, vocabulary: Vocabulary) -> CompiledGrammar:
    with metrics.GRAMMAR_COMPILE_SECONDS.time():
        try:
            return compile_grammar(text, vocabulary)
        except (BatonError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance's panic is one: it ends this grammar alone
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(f"the grammar could not be compiled: {reason}") from error
