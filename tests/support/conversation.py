"""A conversation with a real fleet, by token ids: each prompt is the one before, its answer and
NEW."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

ANSWER_TOKENS = 60
FIRST = [40 + number % 200 for number in range(300)]  # token ids
NEW = [300, 301, 302, 303, 304]
SHOWN_S = 2.0  # within which a router knows what a worker has cached


async def answer(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> list[int]:
    """Return the tokens of an answer, greedy unless `fields` say otherwise."""
    body = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    answered = await client.post("/v1/completions", json=body)
    assert answered.status_code == 200, answered.text
    (choice,) = answered.json()["choices"]
    return list(choice["token_ids"])


async def talk(
    url: str,
    turns: int,
    between: Callable[[int], Awaitable[Any]] | None = None,
    **fields: Any,
) -> list[list[int]]:
    """Return the answers of all turns. `between` is awaited before the turn of that number."""
    prompt, found = FIRST, []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for turn in range(turns):
            if between is not None:
                await between(turn)
            found.append(await answer(client, prompt, **fields))
            prompt = [*prompt, *found[-1], *NEW]
            # Routers have to hear of the cached blocks; they report no end of that.
            await asyncio.sleep(SHOWN_S)
    return found
