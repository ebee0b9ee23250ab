"""A decode worker that speculates is killed while it streams: plain and constrained answers go on.

The answers are those of one process that neither speculates nor is disturbed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import jsonschema
import pytest

from chaos.cluster import Cluster
from tests.support.json_values import JsonObject
from tests.support.request_load import Choices, RequestLoad

pytestmark = [pytest.mark.timeout(300), pytest.mark.nightly]

SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["river", "stone", "lamp"]}, "minItems": 8,
                  "maxItems": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["round", "square"]},
    },
    "required": ["names", "count", "kind"],
}  # fmt: skip
CONSTRAINED = 8
REPEATED = "river stone lamp river stone lamp "


def constrained(number: int) -> JsonObject:
    """A stream of JSON, greedy or seeded, whose prompt has the words of the answer."""
    return {
        "model": "small",
        "messages": [{"role": "user", "content": f"{number} {REPEATED * 12}"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "things", "schema": SCHEMA, "strict": True},
        },
        "max_tokens": 200,
        "temperature": 0 if number % 2 else 0.8,
        "seed": 100 + number,
        "stream": True,
    }


@pytest.fixture(scope="module")
def load(make_streams: Callable[..., RequestLoad]) -> RequestLoad:
    """Plain streams, some of which a stop string may end, then those with a grammar."""
    made = make_streams(16, seed=23)
    for number, body in enumerate(made.bodies):
        if number % 4 == 3:
            body["stop"] = ["the", "in"]
        if "prompt" in body and number % 2:
            body["prompt"] = f"{number} {REPEATED * 12}"
    made.bodies += [constrained(number) for number in range(CONSTRAINED)]
    return made


async def test_killing_a_speculating_decode_worker_changes_no_token(
    make_busy: Callable[..., Cluster],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
    until: Callable[..., Awaitable[None]],
) -> None:
    fleet = make_busy("worker.speculate=ngram").start(1, 2)
    asking = asyncio.create_task(load.run(fleet.url, concurrency=24))

    def verifies_and_streams() -> bool:
        proposed = fleet.metric("decode-0", "baton_proposed_tokens_total", proposer="ngram")
        return bool(proposed > 0 and fleet.audit("decode-0")["running"] >= 4)

    await until(verifies_and_streams)
    fleet.kill("decode-0")
    assert not asking.done()
    answers = await asking
    assert not compare(answers, expected)
    for answer in answers[-CONSTRAINED:]:
        assert answer[0]["finish"] == ["stop"]
        jsonschema.validate(json.loads(answer[0]["text"]), SCHEMA)
    assert fleet.total("baton_accepted_tokens_total", proposer="ngram") > 0
    assert fleet.metric("router", "baton_migrations_total", reason="worker_lost") > 0
    fleet.quiet(within_s=3.0)
