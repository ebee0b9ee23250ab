"""Text in, text out, through real HTTP and real gRPC, with fake tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from baton.router.text.tokenizer import HfTokenizer
from baton.runtime.identity import chain, cluster_key, root
from tests.support.json_values import Json
from tests.support.router_process import RunningRouter, StartRouter
from tests.support.scripted_worker import draw
from tests.support.waiting import eventually

KEY = cluster_key("a secret of the test")


async def expected_text(
    folder: Path,
    draw: Callable[[list[int], int, int, int], int],
    prompt: list[int],
    seed: int,
    choice: int,
    count: int,
    vocab: int,
) -> str:
    tokenizer = HfTokenizer(folder / "tokenizer.json")
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(draw([*prompt, *tokens], seed, choice, vocab))
    await tokenizer.close()
    return tokenizer.decode(tokens)


def events(body: str) -> list[Json]:
    found = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


async def prompt_of(running: RunningRouter, **body: Json) -> list[int]:
    reply = await running.http.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["tokens"]
    return tokens


async def test_chat_whole(router: StartRouter, model_folder: Path) -> None:
    async with router() as running:
        running.workers["decode-0"].cached_tokens = 2
        reply = await running.chat(seed=7, max_tokens=20)
        assert reply.status_code == 200, reply.text
        body = reply.json()
        prompt = await prompt_of(running, messages=[{"role": "user", "content": "hi"}])
        text = await expected_text(model_folder, draw, prompt, 7, 0, 20, running.vocabulary)
        assert body["choices"][0]["message"]["content"] == text
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 20,
            "total_tokens": len(prompt) + 20,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
        assert reply.headers["x-request-id"].startswith("req-")


async def test_chat_stream_adds_up_to_the_whole(router: StartRouter) -> None:
    async with router() as running:
        whole = (await running.chat(seed=3, max_tokens=50)).json()
        reply = await running.chat(
            seed=3, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
        assert reply.headers["content-type"].startswith("text/event-stream")
        chunks = events(reply.text)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
        assert deltas[0]["delta"]["role"] == "assistant"
        text = "".join(delta["delta"].get("content", "") for delta in deltas)
        assert text == whole["choices"][0]["message"]["content"]
        finishes = [delta["finish_reason"] for delta in deltas]
        assert finishes == [None] * (len(finishes) - 1) + ["length"]


async def test_completion_choices_and_logprobs(router: StartRouter, model_folder: Path) -> None:
    async with router() as running:
        reply = await running.complete(seed=5, max_tokens=6, n=3, logprobs=2)
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        prompt = await prompt_of(running, prompt="the quick brown")
        for choice in choices:
            assert choice["text"] == await expected_text(
                model_folder, draw, prompt, 5, choice["index"], 6, running.vocabulary
            )
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 6
            assert logprobs["token_logprobs"] == [-0.5] * 6
            assert logprobs["text_offset"][0] == 0
        assert len({choice["text"] for choice in choices}) == 3
        assert reply.json()["usage"]["completion_tokens"] == 18


async def test_stop_string_cancels_and_cuts(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        full = (await running.complete(seed=1, max_tokens=200)).json()["choices"][0]["text"]
        stop = full[40:44]
        worker.step_s = 0.001
        for stream in (False, True):
            reply = await running.complete(seed=1, max_tokens=3000, stop=stop, stream=stream)
            if stream:
                parts = [event["choices"][0] for event in events(reply.text)]
                text = "".join(part["text"] for part in parts)
                finish = parts[-1]["finish_reason"]
            else:
                text = reply.json()["choices"][0]["text"]
                finish = reply.json()["choices"][0]["finish_reason"]
            assert text == full[: full.index(stop)]
            assert finish == "stop"
        await eventually(lambda: len(worker.seen("cancel")) == 2 and not worker.held)


async def test_end_token_is_not_shown(router: StartRouter) -> None:
    async with router() as running:
        running.workers["decode-0"].stop_at = 4
        body = (await running.complete(seed=1, max_tokens=9)).json()
        assert body["choices"][0]["finish_reason"] == "stop"
        assert "<|im_end|>" not in body["choices"][0]["text"]
        assert body["usage"]["completion_tokens"] == 5
        (submit,) = running.workers["decode-0"].seen("submit")
        assert list(submit.stop_token_ids) == [1]


async def test_ended_requests_are_settled(router: StartRouter) -> None:
    async with router() as running:
        await running.complete(max_tokens=2)
        worker = running.workers["decode-0"]
        await eventually(lambda: not worker.held and len(worker.seen("settled")) == 1)
        assert not worker.seen("cancel")


async def test_the_worker_that_holds_the_prefix_is_chosen(router: StartRouter) -> None:
    async with router(workers=("decode-0", "decode-1", "prefill-0")) as running:
        prompt = await prompt_of(running, prompt="the quick " * 100)
        blocks = chain(KEY, root(KEY, "f" * 32, "float32"), prompt, 16)

        async def goes_to() -> str:
            for worker in running.workers.values():
                worker.received.clear()
            reply = await running.complete(prompt="the quick " * 100, max_tokens=1)
            assert reply.status_code == 200
            (found,) = [w for w in running.workers.values() if w.seen("submit")]
            (submit,) = found.seen("submit")
            return f"{found.worker_id} {'local' if submit.placement.local else 'away'}"

        async def is_followed(expected: str) -> None:
            async def holds() -> bool:
                return await goes_to() == expected

            await eventually(holds)

        running.workers["decode-1"].publish(blocks)
        await is_followed("decode-1 local")  # nearly all of it is there: auto stays local
        running.workers["decode-1"].publish([blocks[0]], skip=3)  # a gap: watched from the start
        await is_followed("decode-1 local")
        await running.workers["decode-1"].die()
        await is_followed("decode-0 away")


async def test_a_large_snapshot_is_taken_in_slices(router: StartRouter) -> None:
    async with router(workers=("decode-0", "decode-1", "prefill-0")) as running:
        prompt = await prompt_of(running, prompt="the quick " * 100)
        blocks = chain(KEY, root(KEY, "f" * 32, "float32"), prompt, 16)
        worker = running.workers["decode-1"]
        worker.blocks = [bytes([n % 256, n // 256]) * 8 for n in range(10_000)] + blocks
        worker.publish([], skip=1)  # a gap makes the router take the snapshot

        async def is_local() -> bool:
            await running.complete(prompt="the quick " * 100, max_tokens=1)
            seen = worker.seen("submit")
            return bool(seen) and bool(seen[-1].placement.local)

        await eventually(is_local)


async def test_prefill_candidates_are_named(router: StartRouter) -> None:
    workers = ("decode-0", "prefill-0", "prefill-1")
    async with router(workers=workers) as running:
        running.workers["prefill-1"].blocks = []
        await eventually(lambda: all(worker.seen("hello") for worker in running.workers.values()))

        async def candidates(words: int) -> list[str]:
            await running.complete(prompt="the quick " * words, max_tokens=1)
            submit = running.workers["decode-0"].seen("submit")[-1]
            assert submit.placement.local == (not submit.placement.candidates)
            return [candidate.worker_id for candidate in submit.placement.candidates]

        async def both() -> bool:
            return sorted(await candidates(100)) == ["prefill-0", "prefill-1"]

        await eventually(both)
        assert await candidates(2) == []  # auto: a short prompt stays local
