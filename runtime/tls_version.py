"""Restricts gRPC in this process, and in those that it starts, to TLS 1.3. Import before grpc.

gRPC for Python has no setting for the version of TLS. It reads the cipher suites of TLS 1.2 from
the environment, once, when it is imported; those of TLS 1.3 are fixed. The one suite named here
needs a pre-shared key, which no side has, so that no handshake of TLS 1.2 can succeed.
"""

from __future__ import annotations

import os
import sys

from baton.runtime.errors import ConfigError

CIPHERS_KEY = "GRPC_SSL_CIPHER_SUITES"
UNUSABLE_CIPHER = "ECDHE-PSK-AES128-CBC-SHA"

_in_time = os.environ.get(CIPHERS_KEY) == UNUSABLE_CIPHER or "grpc._cython" not in sys.modules
os.environ[CIPHERS_KEY] = UNUSABLE_CIPHER


def check_enforced() -> None:
    """Raise ConfigError where gRPC was imported first, and so may accept TLS 1.2."""
    if not _in_time:
        raise ConfigError(
            "TLS 1.3 is not enforced, because grpc was imported before baton.runtime.tls_version: "
            f"import that module first, or start with {CIPHERS_KEY}={UNUSABLE_CIPHER}"
        )
