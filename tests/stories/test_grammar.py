"""Requests with grammars: the same valid answer wherever it is computed, and whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from baton.proto import worker_pb2
from baton.router.grammars.lark_text import GrammarTool
from baton.router.grammars.tool_grammar import required_calls
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.tool_calls import ToolCallParser
from baton.runtime.errors import Unavailable
from baton.runtime.grammar import grammar_compiler
from baton.runtime.grammar import matcher as matchers
from baton.runtime.grammar.choice_masks import ChoiceMasks, TokenMask
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grammar.grammar_text import (
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from baton.runtime.grammar.matcher import CompiledGrammar
from baton.runtime.grammar.vocabulary import Vocabulary
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.fleet.oracle_proposer import OracleProposer
from tests.support.grammar_scene import (
    CLOSING,
    END,
    OPENING,
    RustPanic,
    small_vocabulary,
    text_of,
)
from tests.support.json_values import JsonObject
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]
PROMPT = list(range(30))
STEP_S = 0.004
SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                  "minItems": 2, "maxItems": 4},
        "kind": {"enum": ["yes", "no", None]},
    },
    "required": ["name", "sizes", "kind"],
}  # fmt: skip
TEXT = json_schema_grammar(SCHEMA)
PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                 "minItems": 1, "maxItems": 3},
        "map": {"type": "object", "properties": {"k": {"type": "string", "maxLength": 4}},
                "required": ["k"]},
        "any": {"anyOf": [{"type": "string", "maxLength": 4},
                          {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    },
    "required": ["rows", "map", "any"],
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return small_vocabulary()


@pytest.fixture
def start(make_cluster: MakeCluster, vocabulary: Vocabulary) -> Callable[..., Client]:
    """A cluster of one worker of each role whose workers have the vocabulary."""

    def made(**settings: Any) -> Client:
        cluster = make_cluster(prefill=0, decode=0, step_s=STEP_S, **settings)
        cluster.vocabulary = vocabulary
        for number in range(2):
            cluster.add_prefill(f"prefill-{number}", 256)
            cluster.add_decode(f"decode-{number}", 256)
        return Client(cluster, "decode-0")

    return made


def ask(client: Client, vocabulary: Vocabulary, text: str = TEXT, **fields: Any) -> Request:
    grammar = worker_pb2.Grammar(text=text, vocabulary=vocabulary.digest)
    sent = {"temperature": 1.0, "seed": 5, "max_tokens": 200, "stop": (END,), **fields}
    return client.submit(PROMPT, grammar=grammar, **sent)


async def answer(request: Request, choice: int = 0) -> list[int]:
    """The tokens of a choice that came to its end."""
    await request.finished()
    end = request.end(choice)
    assert end.end == worker_pb2.STOP, end
    return request.tokens(choice)


def check_valid(tokens: list[int]) -> None:
    jsonschema.validate(json.loads(text_of(tokens)), SCHEMA)


@on_virtual_time
async def test_answers_are_valid_and_the_same_here_and_there(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    found = [
        await answer(ask(client, vocabulary, seed=seed, local=local))
        for seed in range(6)
        for local in (True, False)
    ]
    for tokens in found:
        check_valid(tokens)
    assert found[::2] == found[1::2] and len({tuple(tokens) for tokens in found}) == 6
    await client.cluster.quiet()


@on_virtual_time
async def test_a_migrated_answer_goes_on_within_its_grammar(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    whole = await answer(ask(client, vocabulary))
    other = Client(client.cluster, "decode-1")
    for count in range(1, len(whole)):
        for local in (True, False):
            request = ask(other, vocabulary, accepted=whole[:count], local=local)
            assert whole[:count] + await answer(request) == whole, count
            other.requests.clear()


@on_virtual_time
async def test_choices_follow_the_grammar_each_by_itself(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    for local in (True, False):
        request = ask(client, vocabulary, n=3, local=local)
        answers = [await answer(request, choice) for choice in range(3)]
        for tokens in answers:
            check_valid(tokens)
        assert len({tuple(tokens) for tokens in answers}) == 3


@on_virtual_time
async def test_a_killed_prefill_worker_changes_no_token(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    whole = await answer(ask(client, vocabulary))
    request = ask(client, vocabulary, salt=b"other")
    await client.cluster.kill_prefill("prefill-0")
    assert await answer(request) == whole


@on_virtual_time
async def test_an_answer_may_reason_before_the_grammar_begins(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    grammar = worker_pb2.Grammar(
        text=TEXT,
        vocabulary=vocabulary.digest,
        reasoning=worker_pb2.Reasoning(opening=OPENING, closing=CLOSING, opened=True),
    )
    thought = [*b"so", CLOSING]
    request = client.submit(
        PROMPT, grammar=grammar, accepted=thought, max_tokens=200, temperature=1.0, stop=(END,)
    )
    check_valid(await answer(request))


@on_virtual_time
async def test_max_tokens_ends_a_valid_prefix(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    whole = await answer(ask(client, vocabulary))
    request = ask(client, vocabulary, max_tokens=7)
    await request.finished()
    assert request.end().end == worker_pb2.LENGTH and request.tokens() == whole[:7]


@on_virtual_time
async def test_a_complete_answer_ends_whatever_speaks_against_it(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    """The grammar admits nothing but the end: a lower bound and a bias do not count."""
    client = start()
    against = {"min_tokens": 20, "barred": [END], "logit_bias": {END: -100.0}}
    for local in (True, False):
        request = ask(client, vocabulary, choice_grammar(["yes"]), local=local, **against)
        assert text_of(await answer(request)) == "yes"


@on_virtual_time
async def test_a_bad_grammar_fails_its_request_alone(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    good = ask(client, vocabulary)
    bad = ask(client, vocabulary, regex_grammar("(a"))
    await bad.finished()
    assert bad.end().failure.code == "InvalidRequest"
    check_valid(await answer(good))
    await client.cluster.quiet()


@pytest.mark.parametrize("at_prefill", [False, True])
@pytest.mark.parametrize(
    ("owner", "part", "accident"),
    [
        (grammar_compiler, "compile_grammar", MemoryError()),
        (grammar_compiler, "compile_grammar", RustPanic()),
        (GrammarCompiler, "masks", RuntimeError("can't start new thread")),
    ],
)
@on_virtual_time
async def test_an_accident_with_a_grammar_ends_one_attempt(
    start: Callable[..., Client],
    vocabulary: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    part: str,
    accident: BaseException,
    at_prefill: bool,
) -> None:
    """On the decode worker the request fails at once; on a prefill worker another computes it."""
    client, real, calls = start(), getattr(owner, part), iter(range(100))

    def fails_once(*given: object) -> object:
        if next(calls) == at_prefill:
            raise accident
        return real(*given)

    monkeypatch.setattr(owner, part, fails_once)
    text = choice_grammar(["yes"])
    request = ask(client, vocabulary, text)
    await request.finished(1)
    if at_prefill:
        assert text_of(request.tokens()) == "yes"
        failed = client.cluster.prefill["prefill-0"].worker.boot_id
        assert list(request.asked[-1].failed_boot_ids) == [failed]
    else:
        assert request.end().failure.code == "EngineError" and request.end().failure.retryable
    assert text_of(await answer(ask(client, vocabulary, text))) == "yes"
    await client.cluster.quiet()


@on_virtual_time
async def test_a_grammar_of_another_vocabulary_is_refused(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    other = Vocabulary(b"o" * 16, vocabulary.size, vocabulary.tokenizer)
    with pytest.raises(Unavailable, match="tokenizer.json"):
        ask(client, other)


@on_virtual_time
async def test_a_cancel_while_the_grammar_compiles_leaves_nothing(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    client = start()
    request = ask(client, vocabulary)
    client.cancel(request)
    await request.finished()
    assert request.end().end == worker_pb2.CANCELLED
    await client.cluster.quiet()


@on_virtual_time
async def test_a_matcher_over_its_limits_fails_the_request(
    start: Callable[..., Client], vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start()
    bits = matchers.GrammarMatcher.bitmask
    calls = iter(range(100))

    def over(self: matchers.GrammarMatcher) -> bytes | None:
        if next(calls) < 4:
            return bits(self)
        monkeypatch.setattr(matchers.GrammarMatcher, "error", "fuel")
        return None

    monkeypatch.setattr(matchers.GrammarMatcher, "bitmask", over)
    request = ask(client, vocabulary, local=True)
    await request.finished()
    assert request.end().failure.code == "InvalidRequest"
    assert 1 <= len(request.tokens()) <= 4
    await client.cluster.quiet()


async def speculated(
    start: Callable[..., Client],
    vocabulary: Vocabulary,
    share: float,
    local: bool,
    text: str = TEXT,
) -> tuple[list[list[int]], list[list[int]], list[Request]]:
    """Answers of plain decoding, those of a worker that speculates, and the latter's requests."""
    client = start()
    plain = [
        await answer(ask(client, vocabulary, text, seed=seed, local=local)) for seed in range(4)
    ]
    oracle = OracleProposer(share)
    oracle.texts = [[*PROMPT, *tokens] for tokens in plain]
    other = start(proposer=oracle, draft_tokens=4)
    requests = [ask(other, vocabulary, text, seed=seed, local=local) for seed in range(4)]
    found = [await answer(request) for request in requests]
    await other.cluster.quiet()
    return plain, found, requests


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
@on_virtual_time
async def test_speculation_changes_no_token_of_a_grammar(
    start: Callable[..., Client],
    vocabulary: Vocabulary,
    share: float,
    local: bool,
    text: str = TEXT,
) -> None:
    plain, found, requests = await speculated(start, vocabulary, share, local)
    assert found == plain
    accepted = sum(o.accepted_proposal for request in requests for o in request.outputs)
    rejected = sum(o.rejected_proposals for request in requests for o in request.outputs)
    assert accepted > 20 * share and (rejected > 20 or share == 1.0)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
@on_virtual_time
async def test_forced_call_with_lists_and_objects_is_valid(
    start: Callable[..., Client], vocabulary: Vocabulary, form: str, local: bool
) -> None:
    """In markup, under speculation, read from its stream."""
    tools = [GrammarTool("f", PARAMETERS)]
    lark = required_calls(FORMS[form], tools, False, lambda text: None)
    plain, found, requests = await speculated(start, vocabulary, 0.7, local, lark_grammar(lark))
    assert found == plain
    assert sum(o.accepted_proposal for request in requests for o in request.outputs) > 20
    for tokens in found:
        parser = ToolCallParser(CallableTools(FORMS[form], frozenset("f"), True, {"f": PARAMETERS}))
        read = [parser.push(sign) for sign in text_of(tokens)] + [parser.flush()]
        (call,) = [call for _, calls in read for call in calls]
        assert not "".join(content for content, _ in read)
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)


@on_virtual_time
async def test_a_migrated_answer_speculates_within_its_grammar(
    start: Callable[..., Client], vocabulary: Vocabulary
) -> None:
    whole = await answer(ask(start(), vocabulary))
    oracle = OracleProposer(0.7)
    oracle.texts = [[*PROMPT, *whole]]
    client = start(proposer=oracle, draft_tokens=4)
    for count in (1, 9, len(whole) - 2):
        request = ask(client, vocabulary, accepted=whole[:count], local=True)
        assert whole[:count] + await answer(request) == whole


@pytest.mark.parametrize("broken", ["mask of the wrong row", "matcher not rebuilt"])
@on_virtual_time
async def test_a_broken_mask_is_found(
    start: Callable[..., Client],
    vocabulary: Vocabulary,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the tests above compare depends on each mask."""
    whole = await answer(ask(start(), vocabulary))
    kept = 9
    if broken == "mask of the wrong row":
        kept = 0
        monkeypatch.setattr(TokenMask, "extended", lambda mask, tokens: mask)
    else:
        masks = GrammarCompiler.masks

        def forgetful(
            self: GrammarCompiler, message: worker_pb2.Grammar, grammar: CompiledGrammar, _: object
        ) -> ChoiceMasks:
            return masks(self, message, grammar, [])

        monkeypatch.setattr(GrammarCompiler, "masks", forgetful)
    request = ask(start(), vocabulary, accepted=whole[:kept], local=True)
    await request.finished()
    assert whole[:kept] + request.tokens() != whole
