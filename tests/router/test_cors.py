"""Web pages of listed origins may call the API; all others get what they got before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.runtime.config import Config, RouterConfig
from baton.runtime.errors import ConfigError
from baton.runtime.settings.checks import validate
from tests.support.router_process import FAST_ROUTER, StartRouter

PAGE = "https://chat.example"
ASK = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 1}


async def test_listed_origin_may_call(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, cors_origins=(PAGE,))) as running:
        before = await running.http.options("/v1/completions", headers={"origin": PAGE, **ASK})
        assert before.status_code == 204
        assert before.headers["access-control-allow-origin"] == PAGE
        assert "x-stainless-os" in before.headers["access-control-allow-headers"]
        reply = await running.http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["vary"] == "Origin"
        other = {"origin": "https://evil.example"}
        for answer in (
            await running.http.options("/v1/completions", headers={**other, **ASK}),
            await running.http.post("/v1/completions", json=BODY, headers=other),
        ):
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


async def test_keys_are_asked_of_pages_too(router: StartRouter) -> None:
    """The browser's question carries no key, and runs nothing."""
    config = replace(FAST_ROUTER, api_keys=("k",), cors_origins=("*",))
    async with router(config=config) as running:
        page = {"origin": "https://any.example"}
        before = await running.http.options("/v1/completions", headers={**page, **ASK})
        assert before.status_code == 204
        assert before.headers["access-control-allow-origin"] == "*"
        refused = await running.http.post("/v1/completions", json=BODY, headers=page)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "*"  # so that it reads why
        key = {**page, "authorization": "Bearer k"}
        assert (await running.http.post("/v1/completions", json=BODY, headers=key)).is_success


async def test_cors_is_off_by_default(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, api_keys=("k",))) as running:
        reply = await running.http.options("/v1/models", headers={"origin": PAGE, **ASK})
        assert reply.status_code == 401
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("origin", ["*", "chat.example", "https://a/", "https://a:", "null", ""])
def test_origins_that_are_none_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        validate(Config(router=RouterConfig(cors_origins=(origin,))))


def test_origins_are_accepted() -> None:
    origins = ("https://chat.example", "http://127.0.0.1:3000", "http://[::1]:8080")
    validate(Config(router=RouterConfig(cors_origins=origins)))
    validate(Config(router=RouterConfig(cors_origins=("*",), api_keys=("k",))))
