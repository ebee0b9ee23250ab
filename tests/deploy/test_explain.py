"""`baton explain`: the request goes to its route, and the answer is readable."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from baton.deploy.cli import explain as command
from baton.deploy.cli.chat import ChatClient
from baton.runtime.errors import ConfigError
from tests.support.json_values import JsonObject

WORKER = {
    "worker_id": "decode-0",
    "cost": 0.17,
    "parts": {"batch": 0.05, "queue": 0.0, "credit": 0.0, "prefill": 0.12, "slow_start": 0.0},
    "uncached_tokens": 10,
    "queued_tokens": 0,
    "running": 1,
    "waiting": 0,
    "room_tokens": 99,
    "obstacle": "",
}
PROMPT = {
    "decision": "local",
    "reason": "short",
    "prompt_tokens": 10,
    "decode_worker": "decode-0",
    "prefill_candidates": [],
    "timing": "live",
    "prefill_cost": {"here": 0.12, "remote": None, "unit": "s"},
    "decode_costs": {"unit": "s", "workers": [WORKER]},
    "prefill_costs": {"unit": "s", "workers": [{**WORKER, "obstacle": "draining"}]},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, JsonObject]]:
    calls: list[tuple[str, JsonObject]] = []

    def explanation(self: ChatClient, path: str, body: JsonObject) -> JsonObject:
        calls.append((path, body))
        return {"prompts": [PROMPT]}

    monkeypatch.setattr(ChatClient, "explanation", explanation)
    return calls


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "x"}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"),
    ],
)
def test_the_route_is_that_of_the_body(
    asked: list[tuple[str, JsonObject]],
    body: JsonObject,
    path: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(body))
    command.explain(str(file), "http://127.0.0.1:1", None, as_json=False)
    assert asked == [(path, body)]
    text = capsys.readouterr().out
    assert "local (short): 10 prompt tokens, decode on decode-0" in text
    assert "0.120000 s here, no candidate remote, by the live timing" in text
    assert "batch 0.050000, prefill 0.120000\n" in text and "(draining)" in text


def test_json_is_the_servers_own(
    asked: list[tuple[str, JsonObject]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "x"}'))
    command.explain("-", "http://127.0.0.1:1", None, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"prompts": [PROMPT]}


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_file_that_is_no_request_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"request\.json is no request"):
        command.explain(str(file), "http://127.0.0.1:1", None, as_json=False)
