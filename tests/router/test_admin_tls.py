"""A router's admin port: by TLS where other hosts can reach it, in plain text on the loopback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from baton.router.console.admin_port import AdminAccess
from tests.support.client_certificates import ClientCertificates
from tests.support.router_process import FAST_ROUTER, StartRouter

pytestmark = pytest.mark.timed

KEY = "the-operators-key-0123456789"


@pytest.mark.parametrize(
    ("host", "scheme", "other"),
    [("0.0.0.0", "https", "http"), ("127.0.0.1", "http", "https")],
)
async def test_it_speaks_tls_beyond_the_loopback(
    router: StartRouter, tmp_path: Path, host: str, scheme: str, other: str
) -> None:
    certificates = ClientCertificates(tmp_path / "clients")
    config = replace(FAST_ROUTER, tls=str(certificates.folder))
    access = AdminAccess(KEY, host=host)
    trust = certificates.trusting()
    async with router(config=config, admin=access, trust=trust) as running:
        assert running.admin is not None
        url = running.admin.base_url.copy_with(host="127.0.0.1")
        assert url.scheme == scheme
        headers = running.admin.headers
        async with httpx.AsyncClient(base_url=url, headers=headers, verify=trust) as client:
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.get("/v1/models", headers={"authorization": ""})).is_error
        async with httpx.AsyncClient(verify=trust) as client:
            if other == "http":
                answer = await client.get(url.copy_with(scheme=other))
                assert answer.status_code == 400 and "https://" in answer.text
            else:
                with pytest.raises(httpx.TransportError):
                    await client.get(url.copy_with(scheme=other))


@pytest.mark.parametrize(
    ("host", "folder", "url"),
    [
        ("127.0.0.1", "/a", "http://127.0.0.1:7"),
        ("::1", "/a", "http://[::1]:7"),
        ("10.0.0.7", "", "http://10.0.0.7:7"),
        ("10.0.0.7", "/a", "https://10.0.0.7:7"),
        ("fd00::7", "/a", "https://[fd00::7]:7"),
    ],
)
def test_its_url(host: str, folder: str, url: str) -> None:
    assert AdminAccess(KEY, host=host).url(7, folder) == url
