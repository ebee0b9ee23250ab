"""What the validator makes of good requests: defaults, limits, and what reaches the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import orjson
import pytest

from baton.router.requests.openai_schema import ChatRequest, CompletionRequest, DetokenizeRequest
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.requests.validator import Validator
from baton.router.templates.chat_template import ChatTemplate
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.runtime.errors import InvalidRequest, NotFound
from baton.simulation.fleet.byte_tokenizer import ByteTokenizer
from tests.support.json_values import Json

P = ParamSpec("P")
T = TypeVar("T")
LIMITS = ContextLimits(max_context=50, vocab_size=200)
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"


def validator(template: str | None = TEMPLATE) -> Validator:
    made = None if template is None else ChatTemplate(template, {})
    return Validator("m", ByteTokenizer(), made, frozenset({7, 8}), max_choices=4)


async def complete(**fields: Json) -> ValidatedRequest:
    body = orjson.dumps({"model": "m", "prompt": "ab", **fields})
    made = validator()
    return await made.completion(await made.parsed(body, CompletionRequest), LIMITS)


async def chat(**fields: Json) -> ValidatedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    made = validator()
    return await made.chat(await made.parsed(orjson.dumps(body), ChatRequest), LIMITS)


async def test_defaults_of_a_completion() -> None:
    made = await complete()
    assert made.prompt == (255, *b"ab")  # as the tokenizer begins a text
    assert (made.max_tokens, made.choices, made.stops, made.stream) == (16, 1, (), False)
    assert made.stop_token_ids == (7, 8) and not made.logprobs and made.cache_salt == b""
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert sampling.repetition_penalty == 1
    assert sampling.frequency_penalty == sampling.presence_penalty == 0


async def test_defaults_of_a_chat() -> None:
    made = await chat()
    assert made.prompt == tuple(b"uhi;")  # nothing beyond the template
    assert made.max_tokens == 50 - 4  # all the room there is


async def test_a_seed_is_always_set() -> None:
    seeds = {(await complete()).sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert (await complete(seed=5)).sampling.seed == 5
    assert (await complete(seed=-1)).sampling.seed == (1 << 64) - 1
    assert (await complete(seed=0)).sampling.seed == 0


@pytest.mark.parametrize("prompt", [[97, 98], ["ab"], [[97, 98]], "ab"])
async def test_shapes_of_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> None:
    made = await complete(prompt=prompt)
    assert bytes(token for token in made.prompt if token != 255) == b"ab"


async def test_sampling_is_taken_over() -> None:
    made = await complete(
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={"9": -100, "10": 1.5},
        n=4,
    )
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 5, 0.5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-2, 2)
    assert dict(sampling.logit_bias) == {9: -100, 10: 1.5}
    assert made.choices == 4


async def test_null_is_the_default() -> None:
    names = ["max_tokens", "n", "stop", "seed", "logprobs", "temperature", "top_p", "stream"]
    made = await complete(**dict.fromkeys(names))
    assert (made.max_tokens, made.choices, made.sampling.temperature) == (16, 1, 1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
async def test_chat_logprobs(fields: dict[str, int], expected: int | None) -> None:
    made = await chat(**fields)
    assert made.logprobs == (expected is not None)
    if expected is not None:
        assert made.sampling.top_logprobs == expected


async def test_a_stream_repeats_no_long_chat_in_each_choice() -> None:
    limits, made = ContextLimits(max_context=1 << 17, vocab_size=200), validator()
    message = {"role": "user", "content": "a" * 100_000}
    fields = {"model": "m", "messages": [message], "n": 3, "return_token_ids": True}

    async def chat_of(**others: Json) -> ValidatedRequest:
        asked = await made.parsed(orjson.dumps(fields | others), ChatRequest)
        return await made.chat(asked, limits)

    assert (await chat_of()).token_ids  # its body holds the prompt once
    assert (await chat_of(stream=True, n=2)).token_ids
    with pytest.raises(InvalidRequest, match="300006 tokens") as caught:
        await chat_of(stream=True)
    assert caught.value.field == "return_token_ids"


async def test_completion_logprobs() -> None:
    made = await complete(logprobs=0)
    assert made.logprobs and made.sampling.top_logprobs == 0


async def test_stops() -> None:
    assert (await complete(stop="x")).stops == ("x",)
    assert (await complete(stop=["x", "yz"])).stops == ("x", "yz")
    assert (await complete(stop=[])).stops == ()
    assert (await complete(stop_token_ids=[3])).stop_token_ids == (3, 7, 8)
    assert (await complete(stop_token_ids=[3], ignore_eos=True)).stop_token_ids == (3,)


async def test_streams() -> None:
    made = await complete(stream=True, stream_options={"include_usage": True})
    assert made.stream and made.include_usage
    assert not (await complete(stream=True)).include_usage


@pytest.mark.parametrize(("length", "fits"), [(46, True), (48, True), (49, False), (60, False)])
async def test_a_prompt_leaves_room_for_one_token(length: int, fits: bool) -> None:
    prompt = "x" * length  # and the token before it
    if fits:
        assert (await complete(prompt=prompt)).max_tokens == 50 - length - 1
        return
    with pytest.raises(InvalidRequest, match="prompt") as refused:
        await complete(prompt=prompt)
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_asked_tokens_must_fit(name: str) -> None:
    assert (await chat(**{name: 46})).max_tokens == 46
    with pytest.raises(InvalidRequest, match="room for 46") as refused:
        await chat(**{name: 47})
    assert refused.value.field == name


@pytest.mark.parametrize(("token", "good"), [(0, True), (199, True), (200, False)])
async def test_token_ids_end_where_the_smaller_vocabulary_does(token: int, good: bool) -> None:
    if good:
        assert (await complete(prompt=[token])).prompt == (token,)
        return
    with pytest.raises(InvalidRequest, match="0 to 199") as refused:
        await complete(prompt=[5, token])
    assert refused.value.field == "prompt[1]"


async def test_a_model_without_template_refuses_chats() -> None:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        await validator(None).chat(await validator().parsed(body, ChatRequest), LIMITS)


async def test_the_parser_learns_which_tools_may_be_called() -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
    made = Validator(
        "m", ByteTokenizer(), ChatTemplate(template, {}), frozenset(), 4, tool_calls="mistral"
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]

    async def asked(**fields: Json) -> ValidatedRequest:
        raw = orjson.dumps({**body, **fields})
        return await made.chat(await made.parsed(raw, ChatRequest), LIMITS)

    reported = await asked(tools=tools)
    assert reported.prompt == tuple(b"fguhi;")
    assert reported.calling == CallableTools(
        FORMS["mistral"], frozenset("fg"), True, {"f": {}, "g": {}}
    )
    alone = await asked(tools=tools, tool_choice="auto", parallel_tool_calls=False)
    assert alone.calling is not None and not alone.calling.parallel
    for fields in ({}, {"tools": []}, {"tools": tools, "tool_choice": "none"}):
        untold = await asked(**fields)
        assert untold.calling is None and untold.prompt == tuple(b"uhi;")


async def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound):
        await complete(model="x" * 1000)


def test_only_a_token_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name for each token of a long prompt would hold up the loop."""
    made, limits = validator(), ContextLimits(max_context=9000, vocab_size=200)
    named: list[str] = []
    check = made.check_token

    def note(token: int, field: str, limits: ContextLimits) -> None:
        named.append(field)
        check(token, field, limits)

    monkeypatch.setattr(made, "check_token", note)
    made.check_tokens([0, 199] * 4000, "prompt", limits)
    made.check_tokens([], "prompt", limits)
    assert named == []
    for wrong in (200, -1):
        with pytest.raises(InvalidRequest, match=r"prompt\[3\]: -?\d+ is no token id"):
            made.check_tokens([1, 2, 3, wrong, 900, -7], "prompt", limits)
    assert named == ["prompt[3]"] * 2


async def test_each_step_has_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made, steps = validator(), []
    run = made.turns.run

    async def note(size: int, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        steps.append((work.__name__, size))
        return await run(size, work, *given, **named)

    monkeypatch.setattr(made.turns, "run", note)
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]})
    await made.chat(await made.parsed(body, ChatRequest), LIMITS)
    begun, printed = (
        ("next", len(body)),
        [*((name, 0) for name in ("plain_tools", "guard", "render"))],
    )
    checked = [("decode_body", 0), ("parse_fields", 0), ("chat_constraint", 0)]
    assert steps == [begun, *checked, ("plain", 0), *printed]
    steps.clear()
    asked = await made.parsed(b'{"model":"m","prompt":[1,2]}', CompletionRequest)
    await made.completion(asked, LIMITS)
    assert [name for name, _ in steps] == ["next", "decode_body", "parse_fields", "check_tokens"]
    steps.clear()
    await made.text(await made.parsed(b'{"tokens":[1]}', DetokenizeRequest), LIMITS)
    assert [name for name, _ in steps] == ["next", "decode_body", "parse_fields", "decode"]
