"""What a request's answering counts: when its tokens come, choice by choice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from opentelemetry.context import Context
from tokenizers import Tokenizer

from baton.proto import worker_pb2
from baton.router.answers import request_handler
from baton.router.answers.request_handler import Arrival, RequestHandler, RequestServices
from baton.router.requests.admission import Admission
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.text.tokenizer import HfTokenizer
from baton.runtime import metrics
from tests.support.dispatch_scene import DispatchScene, output
from tests.support.router_process import StartRouter
from tests.support.waiting import eventually


def proposed(index: int) -> worker_pb2.Output:
    """A proposal that was accepted, of three."""
    made = output(index, choice=0)
    made.accepted_proposal, made.rejected_proposals = True, 2
    return made


async def test_the_time_between_tokens_is_that_of_one_choice(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, first, between = [100.0], [], []
    clock = type("Clock", (), {"perf_counter": lambda: now_s[0], "time": lambda: now_s[0]})
    monkeypatch.setattr(request_handler, "time", clock)
    monkeypatch.setattr(metrics.TTFT, "observe", first.append)
    monkeypatch.setattr(metrics.ITL, "observe", between.append)
    scene = DispatchScene()
    request = ValidatedRequest(
        prompt=(5, 6, 7), sampling=worker_pb2.Sampling(seed=1), max_tokens=9, choices=2
    )
    tokenizer = HfTokenizer(model_folder / "tokenizer.json")
    serving = RequestServices(scene.dispatcher, cast(Admission, None), tokenizer)
    deadline_s = asyncio.get_running_loop().time() + 3600
    made = RequestHandler(serving, request, "r", Arrival(99.0, deadline_s, Context()))
    await made.begin()
    for at_s, *outputs in (
        (101.0, output(0, choice=0)),
        (103.0, output(0, choice=1)),  # the first of its choice: after nothing
        (104.0, output(1, choice=0)),
        (106.0, output(2, choice=0), output(1, choice=1)),  # one of each
        (107.0, output(3, choice=0), output(4, choice=0)),  # they waited: no time of theirs
        (108.0, output(5, choice=0)),
        (110.0, proposed(6), output(7, choice=0)),  # of one step, which verified a proposal
    ):
        now_s[0] = at_s
        scene.give(*outputs)
        assert await made.next()
    assert first == [2.0]
    assert between == [3.0, 2.0, 3.0, 1.0, 1.0, 1.0]
    assert (made.usage().accepted, made.usage().rejected) == (1, 2)
    made.leave()
    await tokenizer.close()


async def test_a_choice_that_its_stop_string_ends_is_not_computed_on(
    router: StartRouter, model_folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    texts = ("the lazy dog", "the quick brown fox sleeps")
    said = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.says = said
        worker.pause_at = min(map(len, said)) - 1  # so that neither ends by itself
        asking = asyncio.create_task(
            running.complete(prompt="a", n=2, stop="lazy", max_tokens=60, temperature=1)
        )
        await eventually(lambda: worker.seen("cancel"))
        (cancel,) = worker.seen("cancel")
        assert list(cancel.choices) == [0] and worker.held
        worker.pause_at = None
        choices = (await asking).json()["choices"]
        assert [choice["text"] for choice in choices] == ["the ", texts[1]]
        assert len(worker.seen("cancel")) == 1
