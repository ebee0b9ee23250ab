"""The settings by which processes of one cluster find and trust each other, and its objectives.

Sections of `Config` (config.py). Pure standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.runtime.setting import setting

Tls = Literal["on", "off"]


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """TLS between processes. `baton serve` creates the three files for its own processes;
    processes that are started one by one need all three."""

    tls: Tls = setting(
        "on",
        "Mutual TLS between processes; off sends plain text, for a network that only Baton uses.",
    )
    authority: str = setting("", "PEM file with the certificates of trusted authorities.")
    certificate: str = setting(
        "", "PEM file with this process's certificate and those between it and the authority."
    )
    key: str = setting("", "PEM file with the private key, without a passphrase.")
    server_name: str = setting(
        "", "Name in the workers' certificates; empty: they are issued for the workers' addresses."
    )


@dataclass(frozen=True, slots=True)
class SloConfig:
    """The objectives of answers, and the price of a worker. Metrics count by them; placement spares
    streams that would miss `slo.itl_s`; the controller and advice pursue both objectives."""

    ttft_s: float = setting(
        0.0,
        "Objective for the time from a request's arrival to its first token; 0: none.",
        low=0,
        high=86_400,
        unit="s",
    )
    itl_s: float = setting(
        0.0,
        "Objective for the mean time between two tokens of an answer, after the first; 0: none.",
        low=0,
        high=86_400,
        unit="s",
    )
    price_per_hour: float = setting(
        0.0,
        "Price of one worker for an hour, in any currency, for the cost of tokens; 0: unknown.",
        low=0,
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """Where workers register and routers find them. `baton serve` uses a folder of its own."""

    location: str = setting(
        "",
        "A folder, for workers of one host, or a Redis server, for many: "
        "redis://HOST:PORT/DATABASE (rediss:// for TLS).",
    )
    password: str = setting("", "Password of the Redis server.")
    authority: str = setting(
        "",
        "PEM file of the only authorities that are trusted for a rediss:// server; empty: "
        "security.authority and those of the system.",
    )
    cluster: str = setting(
        "baton", "Name of the cluster, with which the keys begin that it has on the Redis server."
    )

    lifetime_s: float = 15.0  # of an entry on Redis that is not renewed
