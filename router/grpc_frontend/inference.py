"""The methods of proto/client.proto, each as its HTTP route: parse, validate, hand on.

The validator, admission and the way of a request are those of the HTTP front end. Owns nothing
beyond a call.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from google.protobuf.message import Message

from baton.proto import client_pb2
from baton.router.answers.request_handler import RequestHandler
from baton.router.client_access.router import Router
from baton.router.grpc_frontend.call import Call, Method
from baton.router.grpc_frontend.reply import pieces_reply, prompt_reply, usage_reply
from baton.router.grpc_frontend.request import detokenizing_of, generation_of, tokenizing_of
from baton.router.requests.body_budget import HeldBody
from baton.runtime import metrics, tracing
from baton.runtime.errors import BatonError

_Shape = TypeVar("_Shape", bound=Message)
SERVICE = client_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class Inference:
    def __init__(self, router: Router) -> None:
        self._router = router

    def methods(self) -> dict[str, Method]:
        return {
            "Generate": self._generate,
            "Tokenize": self._tokenize,
            "Detokenize": self._detokenize,
            "ListModels": self._list_models,
        }

    async def _generate(self, call: Call) -> None:
        router = self._router
        try:
            async with router.receiving(call.deadline_s, call.tenant) as body:
                asked = await self._read(call, body, client_pb2.GenerateRequest)
                limits = router.fleet.limits()
                request = await generation_of(asked, router.validator, limits)
        except BatonError:
            metrics.REQUESTS.labels("refused").inc()
            raise
        metrics.TOKENIZE_SECONDS.observe(time.perf_counter() - call.arrival_s)
        metrics.PROMPT_TOKENS.observe(len(request.prompt))
        answering = RequestHandler(
            router.serving,
            router.of_tenant(request, call.tenant),
            call.request_id,
            call.arrival_s,
            tracing.extract({"traceparent": call.header("traceparent")}),
            call.deadline_s,
        )
        with answering.admitted():
            try:
                await self._answer(answering, call, request.scored)
            finally:
                answering.leave()

    async def _read(self, call: Call, body: HeldBody, shape: type[_Shape]) -> _Shape:
        return await call.read(shape, body, admission=self._router.serving.admission)

    async def _answer(self, answering: RequestHandler, call: Call, scored: bool) -> None:
        await answering.begin()
        token_bytes = self._router.tokenizer.token_bytes
        while (pieces := await answering.next()) is not None:
            shown = [piece for piece in pieces if piece]
            if shown:
                await call.write(pieces_reply(shown, token_bytes))
        if scored:
            reply = await asyncio.to_thread(
                lambda: prompt_reply(answering.prompt_entries(), token_bytes)
            )
            await call.write(reply)
        await call.write(usage_reply(answering.usage()))

    async def _tokenize(self, call: Call) -> None:
        router = self._router
        async with router.receiving(call.deadline_s, call.tenant) as body:
            sent = await self._read(call, body, client_pb2.TokenizeRequest)
            asked = await tokenizing_of(sent, router.validator.turns)
            limits = router.fleet.limits()
            tokens = await router.validator.tokens(asked, limits)
        await call.write(
            client_pb2.TokenizeResponse(tokens=tokens, max_model_len=limits.max_context)
        )

    async def _detokenize(self, call: Call) -> None:
        router = self._router
        async with router.receiving(call.deadline_s, call.tenant) as body:
            sent = await self._read(call, body, client_pb2.DetokenizeRequest)
            asked = await detokenizing_of(sent, router.validator.turns)
            text = await router.validator.text(asked, router.fleet.limits())
        await call.write(client_pb2.DetokenizeResponse(prompt=text))

    async def _list_models(self, call: Call) -> None:
        router = self._router
        async with router.receiving(call.deadline_s, call.tenant) as body:
            await self._read(call, body, client_pb2.ListModelsRequest)
        model = client_pb2.Model(
            id=router.model,
            created=router.started_s,
            max_model_len=router.fleet.limits().max_context,
        )
        await call.write(client_pb2.ListModelsResponse(models=[model]))
