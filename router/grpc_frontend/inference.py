"""The methods of proto/client.proto. Each parses and validates its message like its HTTP route.

Validator, admission and request handler are those of the HTTP front end. Keeps no state between
calls.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from google.protobuf.message import Message

from baton.proto import client_pb2
from baton.router.answers.request_handler import Arrival, RequestHandler
from baton.router.client_access.router import Router
from baton.router.grpc_frontend.call import ClientCall, Method
from baton.router.grpc_frontend.reply import pieces_reply, prompt_reply, usage_reply
from baton.router.grpc_frontend.request import (
    detokenize_request,
    generate_request,
    tokenize_request,
)
from baton.router.requests.body_budget import HeldBody
from baton.router.requests.refusals import count_refusal
from baton.router.requests.request_trace import RequestTrace
from baton.runtime import metrics
from baton.runtime.errors import BatonError
from baton.runtime.telemetry import tracing

_Message = TypeVar("_Message", bound=Message)
SERVICE = client_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService:
    def __init__(self, router: Router) -> None:
        self._router = router

    def methods(self) -> dict[str, Method]:
        return {
            "Generate": self._generate,
            "Tokenize": self._tokenize,
            "Detokenize": self._detokenize,
            "ListModels": self._list_models,
        }

    async def _generate(self, call: ClientCall) -> None:
        router = self._router
        trace = RequestTrace(call.begun_s, call.tenant)
        try:
            held = router.receiving(call.deadline_s, call.tenant, generates=True)
            async with held as body:
                sent = await self._read(call, body, client_pb2.GenerateRequest)
                trace.mark("receive")
                limits = router.fleet.limits()
                request = await generate_request(sent, router.validator, limits, trace.mark)
        except BatonError as error:
            count_refusal(error)
            raise
        trace.mark("validate")
        metrics.TOKENIZE_SECONDS.observe(time.perf_counter() - call.arrival_s)
        metrics.PROMPT_TOKENS.observe(len(request.prompt))
        context = tracing.extract({name: call.header(name) for name in tracing.HEADERS})
        handler = RequestHandler(
            router.serving,
            router.of_tenant(request, call.tenant),
            call.request_id,
            Arrival(call.arrival_s, call.deadline_s, context),
            trace,
        )
        with handler.admitted():
            call.trace_response = handler.trace_response
            try:
                await self._answer(handler, call, request.scored)
            finally:
                handler.leave()

    async def _read(
        self, call: ClientCall, body: HeldBody, message_type: type[_Message]
    ) -> _Message:
        return await call.read(message_type, body, admission=self._router.serving.admission)

    async def _answer(self, handler: RequestHandler, call: ClientCall, scored: bool) -> None:
        await handler.begin()
        token_bytes = self._router.tokenizer.token_bytes
        while (pieces := await handler.next()) is not None:
            shown = [piece for piece in pieces if piece]
            if shown:
                await call.write(pieces_reply(shown, token_bytes), handler.record_written)
        if scored:
            reply = await asyncio.to_thread(
                lambda: prompt_reply(handler.prompt_entries(), token_bytes)
            )
            await call.write(reply)
        await call.write(usage_reply(handler.usage()))

    async def _tokenize(self, call: ClientCall) -> None:
        router = self._router
        async with router.receiving(call.deadline_s, call.tenant) as body:
            sent = await self._read(call, body, client_pb2.TokenizeRequest)
            request = await tokenize_request(sent, router.validator.turns)
            limits = router.fleet.limits()
            tokens = await router.validator.tokens(request, limits)
        await call.write(
            client_pb2.TokenizeResponse(tokens=tokens, max_model_len=limits.max_context)
        )

    async def _detokenize(self, call: ClientCall) -> None:
        router = self._router
        async with router.receiving(call.deadline_s, call.tenant) as body:
            sent = await self._read(call, body, client_pb2.DetokenizeRequest)
            request = await detokenize_request(sent, router.validator.turns)
            text = await router.validator.text(request, router.fleet.limits())
        await call.write(client_pb2.DetokenizeResponse(prompt=text))

    async def _list_models(self, call: ClientCall) -> None:
        router = self._router
        async with router.receiving(call.deadline_s, call.tenant) as body:
            await self._read(call, body, client_pb2.ListModelsRequest)
        model = client_pb2.Model(
            id=router.model,
            created=router.started_s,
            max_model_len=router.fleet.limits().max_context,
        )
        await call.write(client_pb2.ListModelsResponse(models=[model]))
