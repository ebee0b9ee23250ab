"""HTTP clients of tests get a context without authorities.

Otherwise httpx reads all authorities that the machine trusts for each client. That takes 28 ms,
even if no address is reached over TLS.
"""

from __future__ import annotations

import ssl

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
