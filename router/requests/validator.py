"""The one validator, in two calls: `parsed` turns a body into fields, `chat` or `completions` these
into a ValidatedRequest. An error names the field as the client wrote it and the remedy.

Every request passes it before any worker gets it. Knows the model's limits, its tokenizer and its
template; knows no placement. Owns the loop budget that this work is done in.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from baton.proto import worker_pb2
from baton.router.grammars.constraint import Constraint
from baton.router.grammars.grammar_validator import GrammarValidator
from baton.router.requests.answer_forms import AnswerForms
from baton.router.requests.chat_prompt import ChatPrompt
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    Message,
    TokenizeRequest,
    Tool,
)
from baton.router.requests.output_constraint import chat_constraint, output_constraint
from baton.router.requests.prompt_limits import ContextLimits, check_repeated, check_scored
from baton.router.requests.request_parser import count_steps, decode_body, parse_fields
from baton.router.requests.request_trace import Mark, unmarked
from baton.router.requests.sampling_defaults import OPENAI, SamplingDefaults
from baton.router.requests.schema_body import Body
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.templates.chat_template import ChatTemplate
from baton.router.text.tokenizer import Text, Tokenizer, text_length
from baton.runtime.config import ControlTokensInChats, ToolCalls
from baton.runtime.errors import ContextExceeded, InvalidRequest, NotFound

_COUNTED = object()
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_Number = TypeVar("_Number", int, float)
BodyT = TypeVar("BodyT", bound=Body)


def _prompts(
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
) -> Sequence[str | Sequence[int]]:
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [cast(str | Sequence[int], prompt)]
    return cast(Sequence[str | Sequence[int]], prompt)


def _said(given: _Number | None, unsaid: _Number) -> _Number:
    return unsaid if given is None else given


class Validator:
    """The validator for one model. Without a `template` chats are refused. `tool_calls` is the form
    in which the model writes calls."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        end_tokens: frozenset[int],
        max_choices: int,
        *,
        tool_calls: ToolCalls = "auto",
        defaults: SamplingDefaults = OPENAI,
        control_tokens: ControlTokensInChats = "text",
        grammars: GrammarValidator | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        control = None
        if template is not None and control_tokens == "text":
            control = tokenizer.control_tokens(template.literals)
        self._chat_prompt = ChatPrompt(model, template, tool_calls, control)
        self._end_tokens = end_tokens
        self._max_choices = max_choices
        self._defaults = defaults
        self._forms = AnswerForms(model, template, tokenizer, grammars, has_end=bool(end_tokens))
        self.turns = LoopBudget()

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            raise NotFound(
                f"the model {name[:200]!r} does not exist here: use {self._model!r}", "model"
            )

    async def parsed(self, body: bytes, shape: type[BodyT]) -> BodyT:
        """Parse the body as `shape`. Raises InvalidRequest naming the first bad field."""
        await self._count(body, shape.max_values)
        found = await self.turns.run(0, decode_body, body)
        return await self.turns.run(0, parse_fields, found, shape)

    async def _count(self, body: bytes, max_values: int) -> None:
        pieces, size = count_steps(max_values, body), len(body)
        while await self.turns.run(size, next, pieces, _COUNTED) is not _COUNTED:
            size = 0

    async def chat(
        self, request: ChatRequest, limits: ContextLimits, mark: Mark = unmarked
    ) -> ValidatedRequest:
        self.check_model(request.model)
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens are the same: give one", "max_tokens"
            )
        tools, calling = self._chat_prompt.tools(request)
        token = self._tokenizer.token_id
        constraint = await self.turns.run(0, chat_constraint, request, calling, token)
        prompt = await self.chat_tokens(
            request.messages, limits, tools, self._chat_prompt.variables(request, tools), mark
        )
        top = (request.top_logprobs or 0) if request.logprobs else None
        asked, field = request.max_tokens, "max_tokens"
        if request.max_completion_tokens is not None:
            asked, field = request.max_completion_tokens, "max_completion_tokens"
        room = self._room(prompt, asked, field, "messages", limits)
        max_tokens = room if asked is None else max(asked, 1)
        finished = self._finish(request, prompt, top, max_tokens, limits, constraint)
        reasoning = self._forms.reasoning(prompt, request.include_reasoning is not False)
        finished = await self._forms.constrained(finished, constraint, reasoning)
        check_scored([finished])
        if finished.stream:  # a body holds the prompt once, a stream in each choice's first chunk
            check_repeated([finished])
        return replace(finished, calling=calling)

    async def tokens(self, request: TokenizeRequest, limits: ContextLimits) -> list[int]:
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if request.messages is not None:
            return await self.chat_tokens(
                request.messages, limits, request.tools or (), request.chat_template_kwargs
            )
        for name in ("tools", "chat_template_kwargs"):
            if getattr(request, name):
                raise InvalidRequest(f"{name} goes with messages: leave it out beside prompt", name)
        special = request.add_special_tokens is not False
        return await self.text_tokens(request.prompt or "", special, "prompt", limits)

    async def text(self, request: DetokenizeRequest, limits: ContextLimits) -> str:
        self.check_model(request.model)
        self.check_tokens(request.tokens, "tokens", limits)
        decode = self._tokenizer.decode
        return await self.turns.run(0, decode, request.tokens, skip_special_tokens=False)

    async def chat_tokens(
        self,
        messages: Sequence[Message],
        limits: ContextLimits,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        mark: Mark = unmarked,
    ) -> list[int]:
        """Return the prompt's tokens for a chat: exactly what the template printed."""
        plain = await self.turns.run(0, self._chat_prompt.plain, messages, tools)
        text = await self._chat_prompt.text(plain, tools, variables, self.turns)
        mark("render")
        tokens = await self.text_tokens(text, False, "messages", limits)
        mark("tokenize")
        return tokens

    async def completion(
        self,
        request: CompletionRequest,
        limits: ContextLimits,
        source: str = "prompt",
        mark: Mark = unmarked,
    ) -> ValidatedRequest:
        """Validate a completion of one prompt; `source` is the field that the client wrote."""
        (made,) = await self.completions(request, limits, source, mark)
        return made

    async def completions(
        self,
        request: CompletionRequest,
        limits: ContextLimits,
        source: str = "prompt",
        mark: Mark = unmarked,
    ) -> list[ValidatedRequest]:
        """Validate a completion: a request for each prompt. `mark`: after each was tokenized."""
        self.check_model(request.model)
        prompts = _prompts(request.prompt)
        made = []
        for index, prompt in enumerate(prompts):
            name = source if len(prompts) == 1 else f"{source}[{index}]"
            made.append(await self._completion(request, prompt, name, limits, mark))
        check_scored(made)
        check_repeated(made)
        return made

    async def _completion(
        self,
        request: CompletionRequest,
        prompt: str | Sequence[int],
        source: str,
        limits: ContextLimits,
        mark: Mark,
    ) -> ValidatedRequest:
        if isinstance(prompt, str):
            tokens = await self.text_tokens(prompt, True, source, limits)
            mark("tokenize")
        else:
            await self.turns.run(0, self.check_tokens, prompt, source, limits)
            tokens = [*prompt]
        asked = request.max_tokens
        room = self._room(tokens, asked, "max_tokens", source, limits)
        wanted = min(max(COMPLETION_TOKENS, request.min_tokens or 0), room)
        max_tokens = wanted if asked is None else max(asked, 1)
        constraint = output_constraint(request)
        made = self._finish(request, tokens, request.logprobs, max_tokens, limits, constraint)
        made = await self._forms.constrained(made, constraint)
        if not request.echo:
            return made
        if not isinstance(prompt, str):
            decode = self._tokenizer.decode
            prompt = await self.turns.run(0, decode, tokens, skip_special_tokens=False)
        if request.logprobs is not None:
            most = max(request.logprobs, request.prompt_logprobs or 0)
            made.sampling.prompt_logprobs = most
        return replace(made, echo=prompt, echo_top=request.logprobs)

    async def text_tokens(
        self, text: Text, add_special_tokens: bool, field: str, limits: ContextLimits
    ) -> list[int]:
        """Encode, unless the text is so long that no tokenization could fit the context, or a part
        of it has more tokens."""
        length = text_length(text)
        over = length > (limits.max_context + 1) * self._tokenizer.longest_token_bytes
        whole = text if isinstance(text, str) else "".join(piece.text for piece in text)
        if over or await self._tokenizer.exceeds(whole, limits.max_context):
            raise ContextExceeded(
                f"{field}: {length} characters cannot fit the context of "
                f"{limits.max_context} tokens: shorten it",
                field,
            )
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _room(
        self,
        prompt: Sequence[int],
        asked: int | None,
        field: str,
        source: str,
        limits: ContextLimits,
    ) -> int:
        """Return the output tokens of a request without a number: as many as fit beside the prompt
        on every worker, so that any of them can take it, else on the largest one. Raises
        ContextExceeded if `asked` do not fit there."""
        if not prompt:
            raise InvalidRequest(f"{source} is empty: give at least one token", source)
        room = limits.max_context - len(prompt)
        if room < 1:
            raise ContextExceeded(
                f"{source} has {len(prompt)} tokens, and the context is {limits.max_context} "
                "tokens with at least one of output: shorten it",
                source,
            )
        if asked is not None and asked > room:
            raise ContextExceeded(
                f"{field} is {asked}, and beside the {len(prompt)} tokens of {source} the context "
                f"has room for {room}: lower it",
                field,
            )
        anywhere = (limits.common_context or limits.max_context) - len(prompt)
        return anywhere if anywhere > 0 else room

    def _finish(
        self,
        request: GenerationBody,
        prompt: Sequence[int],
        top_logprobs: int | None,
        max_tokens: int,
        limits: ContextLimits,
        constraint: Constraint | None = None,
    ) -> ValidatedRequest:
        choices = request.n or 1
        if choices > self._max_choices:
            raise InvalidRequest(f"n is {choices}: give at most {self._max_choices}", "n")
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        stop = request.stop or ()
        stop_tokens = set(request.stop_token_ids or ())
        self.check_tokens(request.stop_token_ids or (), "stop_token_ids", limits)
        if not request.ignore_eos or constraint is not None:  # a grammar ends with an end token
            stop_tokens |= self._end_tokens
        sampling = self._sampling(request, top_logprobs, limits)
        self._add_least(sampling, request.min_tokens or 0, max_tokens, stop_tokens, limits)
        if request.prompt_logprobs is not None:
            sampling.prompt_logprobs = request.prompt_logprobs
        silent = request.max_tokens == 0
        if silent and request.prompt_logprobs is None and not getattr(request, "echo", False):
            raise InvalidRequest(
                "max_tokens is 0: give at least 1, or ask for echo or prompt_logprobs",
                "max_tokens",
            )
        options = request.stream_options
        return ValidatedRequest(
            prompt=tuple(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            choices=choices,
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(sorted(stop_tokens)),
            cache_salt=(request.cache_salt or "").encode(),
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            prompt_top=request.prompt_logprobs,
            chat=isinstance(request, ChatRequest),
            silent=silent,
            token_ids=bool(request.return_token_ids),
        )

    def _sampling(
        self, request: GenerationBody, top_logprobs: int | None, limits: ContextLimits
    ) -> worker_pb2.Sampling:
        seed = secrets.randbits(64) if request.seed is None else request.seed % (1 << 64)
        unsaid = self._defaults
        return worker_pb2.Sampling(
            temperature=_said(request.temperature, unsaid.temperature),
            top_k=max(0, _said(request.top_k, unsaid.top_k)),  # -1 is another spelling of off
            top_p=_said(request.top_p, unsaid.top_p),
            min_p=_said(request.min_p, unsaid.min_p),
            repetition_penalty=_said(request.repetition_penalty, unsaid.repetition_penalty),
            frequency_penalty=request.frequency_penalty or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            logit_bias=self._bias(request.logit_bias or {}, limits),
            seed=seed,
            top_logprobs=top_logprobs,
        )

    def _add_least(
        self,
        sampling: worker_pb2.Sampling,
        min_tokens: int,
        max_tokens: int,
        stop_tokens: Iterable[int],
        limits: ContextLimits,
    ) -> None:
        """Bar the tokens that end the output until `min_tokens`."""
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, and the output has at most {max_tokens} tokens: "
                "lower it",
                "min_tokens",
            )
        size = self._vocabulary(limits)
        sampling.min_tokens = min_tokens
        if min_tokens:
            sampling.barred.extend(sorted(token for token in stop_tokens if token < size))

    def _bias(self, given: dict[str, float], limits: ContextLimits) -> dict[int, float]:
        bias = {}
        for key, value in given.items():
            field = f"logit_bias.{key[:40]}"
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequest(f"{field}: the key must be a token id", field)
            self.check_token(int(key), field, limits)
            if int(key) in bias:
                raise InvalidRequest(
                    f"{field}: token {int(key)} has a bias already: give one", field
                )
            bias[int(key)] = value
        return bias

    def check_tokens(self, tokens: Sequence[int], field: str, limits: ContextLimits) -> None:
        """Raise ContextExceeded if the tokens do not fit the context, or InvalidRequest naming the
        first that is out of range."""
        if len(tokens) > limits.max_context:
            raise ContextExceeded(
                f"{field} has {len(tokens)} tokens, and the context is {limits.max_context} "
                "tokens: shorten it",
                field,
            )
        size = self._vocabulary(limits)
        # building a field name for each token of a long prompt would be slow
        wrong = next((at for at, token in enumerate(tokens) if not 0 <= token < size), None)
        if wrong is not None:
            self.check_token(tokens[wrong], f"{field}[{wrong}]", limits)

    def check_token(self, token: int, field: str, limits: ContextLimits) -> None:
        """Raise InvalidRequest, which names `field`, unless `token` is in the vocabulary."""
        size = self._vocabulary(limits)
        if not 0 <= token < size:
            raise InvalidRequest(
                f"{field}: {token} is no token id: give one from 0 to {size - 1}", field
            )

    def _vocabulary(self, limits: ContextLimits) -> int:
        return min(limits.vocab_size, max(self._tokenizer.vocab_size, 1))
