"""The Secrets that a release of the chart needs, created once by its hook.

    NAME-secrets          token, api-keys, redis-password
    NAME-authority-key    certificate and key of the release's authority; read by the hook alone
    NAME-ROLE-tls         certificate, key and authority of the router, prefill and decode pods,
                          and of the release's Redis
    NAME-ray-tls          certificate and key of the authority that issues to pods of Ray

What is there stays: an upgrade must not change a token under running workers. Holds no state.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from baton.deploy.host.authority import SKEW
from baton.deploy.host.certificate_forms import (
    Issuer,
    Subject,
    general_name,
    key_pem_of,
    new_issuer,
    new_key,
    pem_of,
    process_certificate,
    read_key,
)
from baton.deploy.host.secrets_api import Secret
from baton.runtime.errors import BatonError

LIFE = timedelta(days=3650)  # of a certificate: no process of a release renews it
RENEWAL = timedelta(days=1825)  # before its end: an upgrade in this time replaces it
TLS = "kubernetes.io/tls"
WORKERS = ("prefill", "decode")


class SecretStore(Protocol):
    """Secrets of one namespace (secrets_api.py)."""

    def read(self, name: str) -> Secret | None: ...

    def create(self, secret: Secret) -> bool: ...

    def replace(self, secret: Secret) -> bool: ...


def create_credentials(store: SecretStore, release: str) -> bool:
    """Create token, API key and Redis password. Return False if they are there already."""
    data = {
        "token": secrets.token_urlsafe(32),
        "api-keys": secrets.token_urlsafe(32),
        "redis-password": secrets.token_urlsafe(32),
    }
    encoded = {name: value.encode() for name, value in data.items()}
    return store.create(Secret(f"{release}-secrets", encoded))


def create_certificates(
    store: SecretStore,
    release: str,
    server_name: str,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    *,
    redis_names: Sequence[str] = (),
    ray: bool = False,
) -> list[str]:
    """Create the certificates that are missing, or near their end, and return their Secrets'
    names. Workers' certificates name `server_name`, that of Redis `redis_names`; without them
    there is none. `ray`: also make an authority for pods of Ray. Raises ConfigError for a name
    that no certificate can have, BatonError if the authority's Secret is not what this function
    wrote."""
    hosts_of_pods = _hosts_of_pods(server_name, redis_names)
    issuer = _issuer(store, f"{release}-authority-key", now())
    made = []
    for pod, hosts in hosts_of_pods.items():
        name = f"{release}-{pod}-tls"
        found = store.read(name)
        if found is not None and _lasts(found, issuer, hosts, now):
            continue
        key = new_key()
        subject = Subject(pod, key.public_key(), hosts)
        certificate = process_certificate(subject, issuer, now() - SKEW, now() + LIFE)
        data = {
            "tls.crt": pem_of(certificate).encode(),
            "tls.key": key_pem_of(key).encode(),
            "ca.crt": pem_of(issuer.certificate).encode(),
        }
        if found is None:
            stored = store.create(Secret(name, data, TLS))
        else:
            stored = store.replace(Secret(name, data, TLS, found.version))
        if not stored:
            raise BatonError(f"another process changed the Secret {name}: run the hook again")
        made.append(name)
    if ray and _create_ray_authority(store, f"{release}-ray-tls", now()):
        made.append(f"{release}-ray-tls")
    return made


def _create_ray_authority(store: SecretStore, name: str, now: datetime) -> bool:
    """Create the authority of Ray's pods, whose key is apart from that of the release's: init
    containers read it. Return False if it is there already."""
    issuer = new_issuer("Baton Ray", now - SKEW, now + 3 * LIFE)
    certificate = pem_of(issuer.certificate).encode()
    data = {
        "tls.crt": certificate,
        "tls.key": key_pem_of(issuer.key).encode(),
        "ca.crt": certificate,
    }
    return store.create(Secret(name, data, TLS))


def _hosts_of_pods(
    server_name: str, redis_names: Sequence[str]
) -> dict[str, tuple[x509.GeneralName, ...]]:
    """Return at which names each component is called; a router's certificate is for its calls."""
    worker = general_name(server_name, "--certificates")
    hosts: dict[str, tuple[x509.GeneralName, ...]] = {"router": ()}
    hosts |= dict.fromkeys(WORKERS, (worker,))
    if redis_names:
        hosts["redis"] = tuple(general_name(name, "--redis") for name in redis_names)
    return hosts


def _issuer(store: SecretStore, name: str, now: datetime) -> Issuer:
    found = store.read(name)
    if found is None:
        issuer = new_issuer("Baton release", now - SKEW, now + 3 * LIFE)
        data = {
            "tls.crt": pem_of(issuer.certificate).encode(),
            "tls.key": key_pem_of(issuer.key).encode(),
        }
        if not store.create(Secret(name, data, TLS)):
            raise BatonError(f"another process created the Secret {name}: run the hook again")
        return issuer
    try:
        key = read_key(found.data["tls.key"])
        return Issuer(x509.load_pem_x509_certificate(found.data["tls.crt"]), key)
    except (KeyError, ValueError) as error:
        raise BatonError(
            f"the Secret {name} holds no authority ({error}): delete it and all -tls Secrets of "
            "the release, then upgrade it; all its pods must restart"
        ) from error


def _lasts(
    secret: Secret,
    issuer: Issuer,
    hosts: Sequence[x509.GeneralName],
    now: Callable[[], datetime],
) -> bool:
    """Return whether the certificate is the issuer's, names the hosts, and is not near its end."""
    try:
        certificate = x509.load_pem_x509_certificate(secret.data["tls.crt"])
        certificate.verify_directly_issued_by(issuer.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (KeyError, ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature):
        return False
    return set(hosts) <= set(names) and now() < certificate.not_valid_after_utc - RENEWAL
