"""`baton explain`: how a running router would place a request, and what each worker would cost.

Sends the request's body to the router's explain route, which places nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from baton.deploy.cli.chat import ChatClient, printable
from baton.deploy.cli.chat_session import running_url
from baton.runtime.errors import ConfigError


def explain(file: str, url: str | None, api_key: str | None, *, as_json: bool) -> None:
    """Print the explanation of the request in `file` ("-": standard input). Raises ConfigError for
    a file that is no request, or without a server, ServerRefusal where the request cannot be
    placed, Unavailable if nothing answers."""
    body = _body(file)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    found = ChatClient(url or running_url(api_key), api_key).explanation(path, body)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for prompt in found["prompts"]:
        print(printable("\n".join(lines(prompt))))


def lines(found: dict[str, Any]) -> list[str]:
    """Return the text of one prompt's explanation."""
    costs = found["prefill_cost"]
    remote = "no candidate" if costs["remote"] is None else f"{costs['remote']:.6f} s"
    shown = [
        f"{found['decision']} ({found['reason']}): {found['prompt_tokens']} prompt tokens, decode "
        f"on {found['decode_worker']}",
        f"prefill: {costs['here']:.6f} s here, {remote} remote, by the {found['timing']} timing",
    ]
    for role in ("decode", "prefill"):
        group = found[f"{role}_costs"]
        shown.append(f"{role} workers, in seconds:")
        shown += [_row(worker) for worker in group["workers"]] or ["  none"]
    return shown


def _row(worker: dict[str, Any]) -> str:
    obstacle = f"  ({worker['obstacle']})" if worker["obstacle"] else ""
    parts = [f"{name} {value:.6f}" for name, value in worker["parts"].items() if value]
    return (
        f"  {worker['cost']:>12.6f}  {worker['worker_id']:<16} "
        f"{worker['uncached_tokens']} uncached, "
        f"{worker['queued_tokens']} queued tokens, {worker['running']} running, "
        f"{worker['waiting']} waiting{obstacle}: {', '.join(parts) or 'nothing'}"
    )


def _body(file: str) -> dict[str, Any]:
    try:
        found = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no request ({error}): give a JSON body") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no request: give a JSON object, as the API's routes take it")
    return found
