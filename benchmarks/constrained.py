"""Constrained decoding: are the answers valid, are they the same everywhere, what does a step cost.

    python -m benchmarks.constrained --json FILE

Real schedulers, handoffs and engines (baton-tiny, and a random model with its tokenizer) answer one
request for each schema of `constrained_schemas.py`. An answer that ends with `stop` is checked by
jsonschema; one that ends with `length` must be a prefix that the grammar admits. The cost of masks
in a step is that of `constrained_step_cost`.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from baton.engine.speculation.ngram_proposer import NgramProposer
from baton.models.embedded import embedded_model
from baton.models.random_model import make_shaped_model
from baton.proto import worker_pb2
from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.grammar_text import json_schema_grammar
from baton.runtime.grammar.matcher import CompiledGrammar, compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, read_vocabulary
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.model_cluster import ModelCluster
from benchmarks.constrained_step_cost import step_costs
from benchmarks.figures.report import Figure, at_least, parser, report
from benchmarks.fleets.fixed_speculators import FixedSpeculator
from benchmarks.inputs.constrained_schemas import Schema, all_schemas
from benchmarks.speculation import DRAFT_TOKENS

MAX_TOKENS = 300
AT_ONCE = 8
REPEATED = 40  # answers that are asked for again under another course of events


@dataclass(frozen=True, slots=True)
class SchemaCase:
    family: str
    schema: Schema
    text: str
    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class ConstrainedAnswer:
    tokens: list[int]
    stopped: bool


class Fleet:
    """Three decode workers, of which the last one speculates, and a prefill worker with one
    model."""

    def __init__(self, folder: Path, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        speculators = iter([None, None, FixedSpeculator(NgramProposer(), DRAFT_TOKENS)])
        self.cluster = ModelCluster(folder, block_size=8, speculator=lambda: next(speculators))
        self.cluster.vocabulary = vocabulary
        self.cluster.add_prefill("prefill-0", 400)
        for number in range(3):
            self.cluster.add_decode(f"decode-{number}", 400)
        self.clients = {name: Client(self.cluster, name) for name in self.cluster.decode}

    async def answer(
        self,
        prompt: list[int],
        case: SchemaCase,
        *,
        worker: str = "decode-0",
        local: bool = True,
        accepted: Sequence[int] = (),
        temperature: float = 0.0,
    ) -> ConstrainedAnswer:
        client = self.clients[worker]
        grammar = worker_pb2.Grammar(text=case.text, vocabulary=self.vocabulary.digest)
        request: Request = client.submit(
            prompt,
            grammar=grammar,
            accepted=list(accepted),
            local=local,
            max_tokens=MAX_TOKENS,
            stop=tuple(self.vocabulary.tokenizer.eos_tokens),
            temperature=temperature,
            seed=len(prompt),
            salt=f"{worker} {local} {len(accepted)}".encode(),
        )
        await request.finished(600)
        stopped = request.end().end == worker_pb2.STOP
        assert stopped or request.end().end == worker_pb2.LENGTH, request.end()
        return ConstrainedAnswer([*accepted, *request.tokens()], stopped)


def accepted_cases(vocabulary: Vocabulary) -> tuple[list[SchemaCase], list[str]]:
    """Return the schemas of which a grammar can be made, and the families of the others."""
    cases, refused = [], []
    for family, schema in all_schemas():
        try:
            text = json_schema_grammar(schema)
            cases.append(SchemaCase(family, schema, text, compile_grammar(text, vocabulary)))
        except InvalidRequest:
            refused.append(family)
    return cases, refused


def prompt_of(case: SchemaCase, vocabulary: Vocabulary, number: int) -> list[int]:
    names = " ".join(case.schema.get("properties", {"value": 0}))
    text = f"<|user|>Give {number} as JSON with {names[:60]}.<|end|><|assistant|>"
    return vocabulary.tokenizer.tokenize_str(text, parse_special=True)


def valid(case: SchemaCase, answer: ConstrainedAnswer, vocabulary: Vocabulary) -> bool:
    """Whether a stopped answer is valid JSON by its schema, or another a prefix of one."""
    ends = set(vocabulary.tokenizer.eos_tokens)
    tokens = [token for token in answer.tokens if token not in ends]
    if not answer.stopped:
        return case.grammar.matcher().consume(tokens) == len(tokens)
    try:
        found = json.loads(vocabulary.tokenizer.decode_bytes(tokens).decode())
    except ValueError:
        return False
    kind = jsonschema.Draft202012Validator
    checker = kind(case.schema, format_checker=kind.FORMAT_CHECKER)
    return bool(checker.is_valid(found))


async def answers_of(
    fleet: Fleet, cases: list[SchemaCase], temperature: float
) -> list[ConstrainedAnswer]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, case: SchemaCase) -> ConstrainedAnswer:
        async with gate:
            prompt = prompt_of(case, fleet.vocabulary, number)
            return await fleet.answer(prompt, case, temperature=temperature)

    return list(await asyncio.gather(*(one(n, case) for n, case in enumerate(cases))))


async def repeated(
    fleet: Fleet, cases: list[SchemaCase], answers: list[ConstrainedAnswer]
) -> dict[str, float]:
    """Return the share of equal answers after a handoff, after their worker was lost, and under
    speculation."""
    draws = random.Random(3)
    chosen = draws.sample(range(len(cases)), min(REPEATED, len(cases)))
    equal = {"handoff": 0, "kill": 0, "speculation": 0}
    for number in chosen:
        case, whole = cases[number], answers[number]
        prompt = prompt_of(case, fleet.vocabulary, number)
        there = await fleet.answer(prompt, case, local=False)
        equal["handoff"] += there == whole
        kept = draws.randrange(1, len(whole.tokens)) if len(whole.tokens) > 1 else 0
        again = await fleet.answer(prompt, case, worker="decode-1", accepted=whole.tokens[:kept])
        equal["kill"] += again == whole
        proposed = await fleet.answer(prompt, case, worker="decode-2")
        equal["speculation"] += proposed == whole
    return {name: count / len(chosen) for name, count in equal.items()}


async def model_figures(
    name: str, folder: Path, cases: list[SchemaCase], vocabulary: Vocabulary, temperature: float
) -> list[Figure]:
    fleet = Fleet(folder, vocabulary)
    try:
        answers = await answers_of(fleet, cases, temperature)
        stopped = [(c, a) for c, a in zip(cases, answers, strict=True) if a.stopped]
        cut = [(c, a) for c, a in zip(cases, answers, strict=True) if not a.stopped]
        wrong = [c.family for c, a in stopped if not valid(c, a, vocabulary)]
        share = 1 - len(wrong) / len(stopped) if stopped else 0.0
        prefixes = all(valid(c, a, vocabulary) for c, a in cut)
        found = [
            Figure(f"valid_share_{name}", share, "", f"limit: 1; wrong: {wrong[:5]}", share == 1.0),
            at_least(f"accepted_prefixes_{name}", float(prefixes), 1.0),
            Figure(
                f"stopped_share_{name}",
                len(stopped) / len(answers),
                "",
                "limit: 0.95" if name == "baton_tiny" else "no limit: it draws at random",
                len(stopped) / len(answers) >= 0.95 if name == "baton_tiny" else None,
            ),
        ]
        if name == "baton_tiny":
            equal = await repeated(fleet, cases, answers)
            found += [at_least(f"tokens_equal_{how}", each, 1.0) for how, each in equal.items()]
        for family in sorted({case.family for case, _ in cut}):
            count = sum(case.family == family for case, _ in cut)
            print(f"  {name}: {count} answers of {family} were cut at {MAX_TOKENS} tokens")
        return found
    finally:
        await fleet.cluster.close()


async def measured(folder: Path, random_folder: Path) -> tuple[list[Figure], list[str]]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    generation_config = json.loads((folder / "generation_config.json").read_text())
    path = folder / "tokenizer.json"
    vocabulary = read_vocabulary(path, config["vocab_size"], [generation_config["eos_token_id"]])
    cases, refused = accepted_cases(vocabulary)
    total = len(cases) + len(refused)
    figures = [
        at_least("schemas", total, 300),
        Figure("refused_share", len(refused) / total, "", f"families: {sorted(set(refused))}"),
    ]
    figures += await model_figures("baton_tiny", folder, cases, vocabulary, 0.0)
    figures += await model_figures("random", random_folder, cases, vocabulary, 1.0)
    return figures, []


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    figures = list(step_costs())
    folder = embedded_model()
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        random_folder = make_shaped_model(
            Path(name), layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128,
            vocab=vocab, dtype="bfloat16", seed=5,
        )  # fmt: skip
        found, notes = asyncio.run(measured(folder, random_folder))
    report([*figures, *found], options.json, notes)


if __name__ == "__main__":
    main()
