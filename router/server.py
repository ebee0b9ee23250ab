"""The router process: makes its parts, binds its port, and serves until it has to stop.

To stop, readiness is turned off, open requests get a grace period to end, then links close;
without open requests there is no wait. A second signal ends the grace period. Owns every part of
the router. Handles SIGTERM and SIGINT if it runs in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from baton.router.answers.objectives import Scorekeeper
from baton.router.answers.request_handler import RequestServices
from baton.router.client_access.router import Router
from baton.router.console.admin_port import AdminAccess, AdminPort
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.fleet.dialer import Dialer, GrpcDialer
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.fleet_timing import FleetTiming
from baton.router.grammars.grammar_validator import GrammarValidator, VocabularyFile
from baton.router.grpc_frontend.frontend import GrpcFrontend
from baton.router.http_frontend.app import build_app
from baton.router.http_frontend.auth_middleware import AuthMiddleware
from baton.router.http_frontend.http_protocol import BoundedHttpProtocol
from baton.router.requests.admission import Admission
from baton.router.requests.body_budget import body_budget
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.sampling_defaults import sampling_defaults
from baton.router.requests.validator import Validator
from baton.router.templates.chat_template import template_of
from baton.router.templates.model_card import ModelCard, read_card, tokenizer_info
from baton.router.text.tokenizer import HfTokenizer
from baton.runtime import logs
from baton.runtime.config import NO_GRPC, Config, RouterConfig
from baton.runtime.errors import ConfigError
from baton.runtime.exposition import process_gauges, standard_names
from baton.runtime.identity import cluster_key
from baton.runtime.registry_client import RegistryClient
from baton.runtime.serving.client_tls import ClientTls, client_tls
from baton.runtime.serving.http_server import HttpServer, listen
from baton.runtime.shared_registry.report_exchange import ReportExchange

LAST_EVENT_S = 5  # for clients to read the last event of a stream that is ended
BACKLOG = RouterConfig().backlog
KEEP_ALIVE_S = 30
MAX_CHOICES = 16  # the largest `n` of a request

log = logs.get(__name__)


async def serve_router(
    config: Config,
    *,
    model_folder: Path,
    model_name: str,
    registry: RegistryClient,
    token: str,
    ready: Callable[[str], None] | None = None,
    grpc_ready: Callable[[str], None] | None = None,
    dialer: Dialer | None = None,
    admin: AdminAccess | None = None,
    admin_ready: Callable[[int], None] | None = None,
    reports: ReportExchange | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation. `ready` is called once with the URL when the
    port answers (/readyz says whether workers are there); before it, `grpc_ready` with the gRPC
    host:port and `admin_ready` with the admin port, where there is one. `token` keys the identities
    of blocks; without a `dialer` it is sent to the workers too; `reports` reaches the other
    routers. Raises ConfigError for a port in use, a reachable host without keys or a certificate
    that cannot be used, ModelError for the model's folder."""
    check_exposure(config.router)
    tls = client_tls(config.router.tls)
    card = read_card(model_folder, model_name)
    tokenizer = HfTokenizer(card.tokenizer_file)
    grammars = GrammarValidator(vocabulary_file(card))
    listener = bind(config.router.host, config.router.port, config.router.backlog)
    try:
        key = cluster_key(token)
        limits = ContextLimits(card.max_context, card.vocab_size)
        fleet = Fleet(
            registry,
            dialer or GrpcDialer(token),
            config.router,
            key,
            limits,
            reports=reports,
            timing=FleetTiming(config.step, config.slo.itl_s),
        )
        router = _router(config, card, fleet, tokenizer, grammars, key)
        async with _admin_port(router, admin, admin_ready, tls):
            front = await _grpc_front(router, grpc_ready, tls)
            await _serve(router, _http_server(router, listener, ready, tls), front)
    finally:
        listener.close()
        await grammars.close()
        await tokenizer.close()


def _router(
    config: Config,
    card: ModelCard,
    fleet: Fleet,
    tokenizer: HfTokenizer,
    grammars: GrammarValidator,
    key: bytes,
) -> Router:
    dispatcher = Dispatcher(fleet, config.router, config.step)
    return Router(
        config=config.router,
        model=card.name,
        started_s=int(time.time()),
        fleet=fleet,
        validator=_validator(card, tokenizer, config.router, grammars),
        tokenizer=tokenizer,
        serving=RequestServices(
            dispatcher,
            Admission(config.router.max_requests, time.monotonic),
            tokenizer,
            Scorekeeper(card.name, config.slo),
        ),
        bodies=body_budget(config.router, time.monotonic),
        key=key,
        tokenizer_info=tokenizer_info(card),
    )


def _validator(
    card: ModelCard, tokenizer: HfTokenizer, config: RouterConfig, grammars: GrammarValidator
) -> Validator:
    return Validator(
        card.name,
        tokenizer,
        template_of(card),
        card.end_tokens,
        MAX_CHOICES,
        tool_calls=config.tool_calls,
        defaults=sampling_defaults(card.generation_config if config.model_sampling else {}),
        control_tokens=config.control_tokens,
        grammars=grammars,
    )


def vocabulary_file(card: ModelCard) -> VocabularyFile:
    return VocabularyFile(card.tokenizer_file, card.vocab_size, sorted(card.end_tokens))


async def _grpc_front(
    router: Router, ready: Callable[[str], None] | None, tls: ClientTls | None
) -> GrpcFrontend | None:
    if router.config.grpc_port == NO_GRPC:
        return None
    front = GrpcFrontend(router, tls)
    address = await front.start()
    if ready is not None:
        ready(address)
    return front


@contextlib.asynccontextmanager
async def _admin_port(
    router: Router,
    access: AdminAccess | None,
    ready: Callable[[int], None] | None,
    tls: ClientTls | None,
) -> AsyncIterator[None]:
    """Serve the admin port within the block, if there is to be one."""
    if access is None:
        yield
        return
    admin = AdminPort(router, access, tls)
    await admin.start()
    if ready is not None:
        ready(admin.port)
    try:
        yield
    finally:
        await admin.stop()


def _http_server(
    router: Router,
    listener: socket.socket,
    ready: Callable[[str], None] | None,
    tls: ClientTls | None,
) -> HttpServer:
    return HttpServer(
        AuthMiddleware(build_app(router), router.config.api_keys, router.config.cors_origins),
        listener,
        protocol=BoundedHttpProtocol,
        backlog=router.config.backlog,
        drain_s=math.ceil(router.config.drain_s) + LAST_EVENT_S,
        keep_alive_s=KEEP_ALIVE_S,
        # BoundedHttpProtocol refuses before
        limit_concurrency=router.config.max_connections + 1,
        on_started=lambda: ready(url_of(listener, tls)) if ready is not None else None,
        tls=tls,
    )


async def _serve(
    router: Router,
    server: HttpServer,
    front: GrpcFrontend | None,
) -> None:
    dispatcher = router.serving.dispatcher
    drain_s, leave_s = router.config.drain_s, router.config.leave_s
    loop = asyncio.get_running_loop()
    process_gauges.watch_process(loop)
    process_gauges.set_role("router")
    standard_names.publish_router(router.model)

    def refuse_new() -> None:
        """Refuse new requests; end the open ones, with a last event, after the grace period."""
        if not server.should_exit:
            server.should_exit = True
            if front is not None:
                front.stop(drain_s + LAST_EVENT_S)
            loop.call_later(drain_s, dispatcher.end_all)

    def end_now() -> None:
        """End all requests now; abort connections that do not read their last event."""
        refuse_new()
        dispatcher.end_all()
        if front is not None:
            front.stop(LAST_EVENT_S)
        loop.call_later(LAST_EVENT_S, server.abort)

    def stop() -> None:
        """Turn off readiness first, so that load balancers notice; the second call ends now."""
        if router.stopping:
            end_now()
        else:
            router.stopping = True
            loop.call_later(leave_s, refuse_new)

    following = asyncio.create_task(router.fleet.run(dispatcher), name="fleet")
    serving = asyncio.create_task(server.run_until_exit(), name="http")
    with _signals(stop):
        try:
            # bounded by the process's owner: this is the router's whole life
            await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not router.stopping:
                stop()
            if not serving.done():
                await asyncio.wait({serving}, timeout=leave_s + drain_s + 2 * LAST_EVENT_S)
            if front is not None:
                await front.stop(drain_s + LAST_EVENT_S)
            await dispatcher.close()
            for task in (serving, following):
                task.cancel()
            await asyncio.gather(serving, following, return_exceptions=True)
    for task in (serving, following):
        if not task.cancelled():
            task.result()


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def check_exposure(config: RouterConfig) -> None:
    """Raises ConfigError if other hosts could use the router without a key."""
    if not config.api_keys and not config.on_loopback:
        raise ConfigError(
            f"router.host is {config.host!r}, which other hosts can reach, and router.api_keys is "
            "empty: set router.api_keys, or use 127.0.0.1"
        )


def bind(host: str, port: int, backlog: int = BACKLOG) -> socket.socket:
    """Return a listening socket with a queue of `backlog` connections. Raises ConfigError, which
    names the port and the remedy."""
    try:
        return listen(host, port, backlog)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: no possible host name
        raise ConfigError(
            f"router.host is {host!r}: {error}; set a host name or an address"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} cannot be used ({error.strerror}): "
            "stop what listens there, or set another port with router.port"
        ) from error


def url_of(listener: socket.socket, tls: ClientTls | None = None) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
