"""The main of a router process: telemetry, the registry, and the server's loop.

The router itself is in router/; this is only how it starts. It imports no torch.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.host.instance import admin_address_file, grpc_address_file, write_private
from baton.deploy.host.process_lifecycle import raise_open_file_limit
from baton.router.console.admin_port import AdminAccess
from baton.router.fleet.dialer import GrpcDialer
from baton.router.server import serve_router
from baton.runtime import logs, process_memory
from baton.runtime.config import Config
from baton.runtime.shared_registry.registry_location import (
    check_tls_files,
    open_registry,
    open_reports,
)
from baton.runtime.telemetry import tracing
from baton.runtime.tls import tls_of


def run_router(
    config: Config,
    *,
    model_folder: Path,
    model_name: str,
    secrets: ClusterSecrets,
    address_file: Path | None,
    admin: AdminAccess | None = None,
) -> None:
    """Serve until SIGTERM. Once the router listens, `address_file` holds host:port, behind https://
    if it speaks TLS; if it serves gRPC, the file beside it (`grpc_address_file`) held that address
    before, and so for its `admin` port (`admin_address_file`).

    Raises ConfigError for a port, a certificate or a model folder that cannot be used.
    """
    telemetry = config.telemetry
    logs.setup("router", telemetry.log_level)
    tracing.setup("router", telemetry.otlp_endpoint, ratio=telemetry.trace_ratio)
    raise_open_file_limit()
    looking: list[asyncio.Task[None]] = []  # ends with the loop

    def ready(address: str) -> None:
        process_memory.freeze_startup_objects()
        looking.append(
            asyncio.get_running_loop().create_task(process_memory.collect_periodically())
        )
        if address_file is not None:
            write_private(address_file, address.removeprefix("http://").rstrip("/"))

    def grpc_ready(address: str) -> None:
        if address_file is not None:
            write_private(grpc_address_file(address_file), address)

    def admin_ready(port: int) -> None:
        if address_file is not None and admin is not None:
            write_private(admin_address_file(address_file), admin.address(port, config.router.tls))

    check_tls_files(config.registry, config.security)
    registry = open_registry(config.registry, config.security, secrets.accepted, deletes_dead=True)
    reports = open_reports(config.registry, config.security, secrets.accepted)

    async def serve() -> None:
        try:
            await serve_router(
                config,
                model_folder=model_folder,
                model_name=model_name,
                registry=registry,
                reports=reports,
                token=secrets.identity,
                ready=ready,
                grpc_ready=grpc_ready,
                dialer=GrpcDialer(secrets.token, tls_of(config.security)),
                admin=admin,
                admin_ready=admin_ready,
            )
        finally:
            await registry.close()

    asyncio.run(serve())
