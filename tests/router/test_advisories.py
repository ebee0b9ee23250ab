"""What went wrong in other servers and could here; docs/security.md names the advisories."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from baton.router.client_access.error_body import error_body
from baton.router.http_frontend.auth_middleware import OPEN_PATHS
from baton.router.requests.openai_schema import ChatRequest, CompletionRequest
from baton.router.requests.request_parser import decode_body, parse_fields
from baton.router.requests.schema_body import Body
from baton.router.templates.chat_template import ChatTemplate
from baton.runtime import errors
from baton.runtime.errors import BatonError, ConfigError, InvalidRequest
from tests.support.json_values import JsonObject
from tests.support.router_process import FAST_ROUTER, StartRouter

CHAT: JsonObject = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETE: JsonObject = {"model": "tiny", "prompt": "hi"}

# What other servers let a client say about transfers, places, templates, tensors and grammars.
OTHERS_FIELDS: JsonObject = {
    "kv_transfer_params": {"do_remote_decode": True, "remote_host": "10.0.0.1"},
    "remote_host": "10.0.0.1",
    "remote_port": 1,
    "remote_block_ids": [1],
    "remote_engine_id": "x",
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "tp_size": 1 << 40,
    "data_parallel_rank": 3,
    "transfer_id": "x",
    "request_id": "mine",
    "block_hashes": ["00"],
    "prompt_embeds": "AAAA",
    "prompt_token_ids": [1],
    "input_ids": [1],
    "mm_processor_kwargs": {"num_crops": 4},
    "multi_modal_data": {"image": "http://10.0.0.1/x"},
    "chat_template": "{% for i in range(999999999) %}x{% endfor %}",
    "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}", "tokenize": True},
    "documents": [{"title": "x"}],
    "guided_json": {"type": "object"},
    "guided_regex": "(a+)+$",
    "guided_grammar": "root ::= " + "(" * 30_000,
    "lora_path": "../../etc",
    "custom_logit_processor": "gASVAAAA",
    "priority": 1 << 70,
}


@pytest.mark.parametrize("name", OTHERS_FIELDS)
@pytest.mark.parametrize("shape", [ChatRequest, CompletionRequest])
def test_what_only_servers_may_say_is_refused_from_a_client(shape: type[Body], name: str) -> None:
    good = CHAT if shape is ChatRequest else COMPLETE
    with pytest.raises(InvalidRequest) as refused:
        parse_fields(decode_body(json.dumps({**good, name: OTHERS_FIELDS[name]}).encode()), shape)
    assert refused.value.field == name
    plain = parse_fields(decode_body(json.dumps(good).encode()), shape)
    null = parse_fields(decode_body(json.dumps({**good, name: None}).encode()), shape)
    assert null == plain  # it requests nothing, and nothing comes of it


@pytest.mark.parametrize("part", ["image_url", "input_audio", "video_url", "file", "audio_url"])
def test_nothing_is_fetched_for_a_client(part: str) -> None:
    content = [{"type": part, part: {"url": "http://169.254.169.254/latest/meta-data"}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\]"):
        parse_fields(decode_body(json.dumps(body).encode()), ChatRequest)


async def asked(url: str, request: bytes) -> int:
    """The status that a request written byte by byte gets."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(20):
        status = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(status.split()[1])


async def test_every_route_needs_the_key_however_it_is_written(router: StartRouter) -> None:
    """A server that decides by a URL put together from headers lets in what the route does not
    mean."""
    paths = [
        *(b"/v1/models", b"/v1/models/tiny", b"/v1/completions", b"/tokenize", b"/detokenize"),
        b"/openapi.json",
        *(b"/", b"/docs", b"/invocations", b"/pause", b"/update_weights"),
        *(b"/inference/v1/generate", b"/collective_rpc", b"/run_script", b"/reset_prefix_cache"),
        *(b"/livez/", b"//livez", b"/livez/../v1/models", b"/livez/%2e%2e/v1/models"),
        *(b"/v1/models?/livez", b"/v1/models#/livez", b"/v1/models;/livez", b"/LIVEZ"),
        *(b"/livez%00/v1/models", b"http://x/v1/models", b"http://livez/v1/models"),
    ]
    async with router(config=replace(FAST_ROUTER, api_keys=("k1",))) as running:
        for path in paths:
            for host in (b"x", b"x/livez?", b"localhost/metrics#", b"127.0.0.1:1@x"):
                head = b" HTTP/1.1\r\nhost: " + host + b"\r\ncontent-length: 0\r\n\r\n"
                for method in (b"GET ", b"POST ", b"OPTIONS "):
                    assert await asked(running.url, method + path + head) in (400, 401), path
        for path in OPEN_PATHS:
            assert (await running.http.get(path)).status_code == 200
        key = {"authorization": "Bearer k1"}
        for path in paths[6:15]:
            reply = await running.http.post(path.decode(), headers=key)
            assert reply.status_code == 404, path  # no such door, with a key either


HERE = ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.8.8.8", "[::1]:80")
ADDRESSES = ("10.0.0.7", "203.0.113.9:80", "[2001:db8::1]", "[::ffff:203.0.113.9]:80")
ELSEWHERE = (
    "evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "host.docker.internal:8000",
)
ODD = ("", "::1", "localhost@evil.example", "evil.example@localhost", "localhost:80:80", "[evil]")


async def test_a_web_page_on_this_host_is_not_its_user(router: StartRouter) -> None:
    """A browser here shows pages of others, and DNS of others may call this host by their names:
    without keys neither asks anything; with keys a name is no matter."""
    ask = {"url": "/v1/completions", "json": COMPLETE | {"max_tokens": 1}}
    async with router() as running:
        here = [{"host": name} for name in (*HERE, *ADDRESSES)]
        here += [{"origin": f"http://{name}"} for name in HERE]
        for named in here:
            assert (await running.http.post(**ask, headers=named)).status_code == 200, named
        reported = [{"host": name} for name in (*ELSEWHERE, *ODD)]
        reported += [{"origin": f"https://{name}"} for name in (*ELSEWHERE, *ADDRESSES)]
        reported += [{"origin": name} for name in ("null", "file://", "localhost", "x://localhost")]
        for named in reported:
            (header,) = named
            for path in ("/v1/models", *OPEN_PATHS):
                reply = await running.http.get(path, headers=named)
                assert reply.status_code == 403, (path, named)
            reply = await running.http.post(**ask, headers=named)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (403, header.title())
            assert "router.api_keys" in error["message"] and error["code"] == "host_not_allowed"
        assert len(running.workers["decode-0"].seen("submit")) == len(here)
    async with router(config=replace(FAST_ROUTER, api_keys=("k1",))) as running:
        key = {
            "authorization": "Bearer k1",
            "host": "host.docker.internal:8000",
            "origin": "https://a.example",
        }
        assert (await running.http.post(**ask, headers=key)).status_code == 200


async def test_ids_of_a_client_name_nothing(router: StartRouter) -> None:
    """Two requests under one X-Request-Id are two requests; no worker ever hears the label."""
    label = "cmpl-___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2"
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.step_s = 0.01
        body = {**COMPLETE, "max_tokens": 20, "seed": 3}
        replies = await asyncio.gather(
            *(
                running.http.post("/v1/completions", json=body, headers={"x-request-id": label})
                for _ in range(4)
            )
        )
        texts = {reply.json()["choices"][0]["text"] for reply in replies}
        assert [reply.status_code for reply in replies] == [200] * 4 and len(texts) == 1
        ids = [submit.request_id for submit in worker.seen("submit")]
        assert len(set(ids)) == 4
        assert not any("addr" in reported for reported in (*ids, *(r.text for r in replies)))
        assert all(len(bytes.fromhex(name.removeprefix("req-"))) == 16 for name in ids)


async def test_any_cache_salt_is_a_salt_or_refused(router: StartRouter) -> None:
    async with router() as running:
        for salt in ("\0", "\n" * 9, "x" * 1024, "é", "../..", "%s%n", "🙂"):
            reply = await running.complete(cache_salt=salt, max_tokens=1)
            assert reply.status_code == 200, salt
        for wrong in ("", "x" * 1025, 7, ["a"], {"a": 1}):
            reply = await running.complete(cache_salt=wrong, max_tokens=1)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "cache_salt"
        raw = b'{"model":"tiny","prompt":"a","cache_salt":"\\ud800"}'
        assert (await running.http.post("/v1/completions", content=raw)).status_code == 400
        salts = [submit.cache_salt for submit in running.workers["decode-0"].seen("submit")]
        assert len(set(salts)) == 7 and {len(salt) for salt in salts} == {32}


def every_error(root: type[BatonError] = BatonError) -> list[type[BatonError]]:
    return [root, *(found for child in root.__subclasses__() for found in every_error(child))]


@pytest.mark.parametrize(
    "kind",
    [each for each in every_error() if each.http_status == 500 or issubclass(each, ConfigError)],
)
def test_an_error_inside_tells_a_client_nothing_of_the_inside(kind: type[BatonError]) -> None:
    assert errors.__name__ in kind.__module__
    secret = "/home/me/model: token 12345 of prompt"
    body = error_body(kind(secret))
    assert "home" not in json.dumps(body) and "12345" not in json.dumps(body)
    assert body["error"]["message"]


def test_messages_cannot_reach_pythons_insides() -> None:
    """A template sees strings, lists and dicts; attributes of Python are not to be had."""
    for attempt in ("__class__", "__init__.__globals__", "format.__self__", "__subclasses__()"):
        source = f"{{{{ messages[0].content.{attempt} }}}}{{{{ messages[0].role }}}}"
        try:
            text = ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
        except InvalidRequest:
            continue
        assert text == "user"
