"""What HTTP clients of tests are given instead of httpx's own choice of authorities.

For each client httpx reads all authorities that the machine trusts, which takes 28 ms, also where
nothing is reached over TLS.
"""

from __future__ import annotations

import ssl

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it trusts nobody
