"""Answers requests in one process: one after another by one engine, without workers.

The reference of the workers' answers. Imports llguidance where it is called. Holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.sampling import SamplingParams
from benchmarks.gpu_parts.small_model import END

if TYPE_CHECKING:
    from baton.runtime.grammar.matcher import CompiledGrammar

BLOCKS, BLOCK_TOKENS = 64, 16


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `schema`: the JSON schema that its answer follows up to `END`; None: any
    `tokens` tokens."""

    prompt: Sequence[int]
    tokens: int
    temperature: float = 0.0
    seed: int = 1
    schema: dict[str, Any] | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed)


async def one_process_answers(model: Path, device: str, asks: Sequence[Ask]) -> list[list[int]]:
    """The answers in the order of `asks`."""
    engine = build_engine(
        model, EngineOptions(blocks=BLOCKS, block_size=BLOCK_TOKENS, device=device)
    )
    try:
        return [await _answer(engine, ask, _grammar(model, engine, ask)) for ask in asks]
    finally:
        await engine.close()


async def _answer(engine: TorchEngine, ask: Ask, grammar: CompiledGrammar | None) -> list[int]:
    from baton.runtime.grammar.choice_masks import ChoiceMasks, InlineMasks

    table = range(-(-(len(ask.prompt) + ask.tokens) // BLOCK_TOKENS))
    answer: list[int] = []
    masks = None if grammar is None else ChoiceMasks(grammar, answer, InlineMasks())
    given, start = list(ask.prompt), 0
    while len(answer) < ask.tokens and not (masks is not None and answer[-1:] == [END]):
        allowed = None if masks is None else masks.mask(start=True)
        draw = Draw(0, start + len(given), ask.params, allowed=allowed)
        result = await engine.submit(StepBatch((Slice(given, start, table, (draw,)),))).result()
        start += len(given)
        given = [result.drawn[0][0].token]
        answer += given
    return answer


def _grammar(model: Path, engine: TorchEngine, ask: Ask) -> CompiledGrammar | None:
    if ask.schema is None:
        return None
    from baton.runtime.grammar.grammar_text import json_schema_grammar
    from baton.runtime.grammar.matcher import compile_grammar
    from baton.runtime.grammar.vocabulary import TOKENIZER_FILE, read_vocabulary

    vocabulary = read_vocabulary(model / TOKENIZER_FILE, engine.spec.vocab_size, (END,))
    return compile_grammar(json_schema_grammar(ask.schema), vocabulary)
