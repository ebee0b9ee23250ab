"""The dispatcher alone, with links that only write down what they are sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from opentelemetry.context import Context

import baton.router.generation as generation_module
from baton.proto import worker_pb2
from baton.router.circuits import Circuits
from baton.router.dispatch import Dispatcher
from baton.router.generation import Generation, OutputToken
from baton.router.generation_request import GenerationRequest
from baton.router.placement import WorkerView
from baton.runtime.config import RouterConfig
from baton.runtime.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from baton.runtime.links import LinkClosed

CONFIG = RouterConfig(stream_buffer_messages=16, max_attempts=3)
PROMPT = (5, 6, 7)


class FakeLink:
    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.boot_id = worker_id.encode()
        self.up = True
        self.placed_tokens = self.placed_requests = 0
        self.load = worker_pb2.Load()
        self.sent: list[worker_pb2.RouterMessage] = []
        self.settled: list[str] = []

    def send(self, message: worker_pb2.RouterMessage) -> None:
        if not self.up:
            raise LinkClosed("down")
        self.sent.append(message)

    def settle(self, request_id: str) -> None:
        self.settled.append(request_id)

    def submits(self) -> list[worker_pb2.Submit]:
        return [m.submit for m in self.sent if m.WhichOneof("kind") == "submit"]

    def cancels(self) -> list[tuple[str, int]]:
        cancels = [m.cancel for m in self.sent if m.WhichOneof("kind") == "cancel"]
        return [(cancel.request_id, cancel.attempt) for cancel in cancels]


class FakeFleet:
    def __init__(self, *names: str) -> None:
        self.links = {name: FakeLink(name) for name in names}
        self.waiting = 0
        self.total_blocks = 100
        self.fingerprints: dict[str, str] = {}  # where they are not "f"
        self.circuits = Circuits(random.Random(1))

    def link(self, worker_id: str) -> FakeLink | None:
        return self.links.get(worker_id)

    def views(self, tokens: Sequence[int], salt: bytes) -> list[WorkerView]:
        roles = {link.boot_id: "decode" for link in self.links.values() if link.up}
        passed_over = self.circuits.passed_over(roles, asyncio.get_running_loop().time())
        return [
            WorkerView(
                link.worker_id,
                link.boot_id,
                "decode",
                "h:1",
                (self.fingerprints.get(link.worker_id, "f"), "d", 16),
                total_blocks=self.total_blocks,
                free_blocks=self.total_blocks,
                waiting=self.waiting,
                passed_over=link.boot_id in passed_over,
                draining=link.load.draining,
            )
            for link in self.links.values()
            if link.up
        ]


class Scene:
    def __init__(self, *names: str, config: RouterConfig = CONFIG) -> None:
        self.fleet = FakeFleet(*(names or ("decode-0",)))
        self.dispatcher = Dispatcher(cast(Any, self.fleet), config)
        self.dispatcher.place_wait_s = 0.2

    async def start(
        self, request_id: str = "r", within_s: float = 3600, **fields: Any
    ) -> Generation:
        deadline_s = asyncio.get_running_loop().time() + within_s
        defaults: dict[str, Any] = {"max_tokens": 9, "stop_token_ids": (1,)}
        request = GenerationRequest(
            prompt=PROMPT, sampling=worker_pb2.Sampling(seed=1), **{**defaults, **fields}
        )
        return await self.dispatcher.start(request, request_id, Context(), deadline_s)

    def link(self, number: int = 0) -> Any:
        return self.fleet.links[f"decode-{number}"]

    def give(self, *outputs: worker_pb2.Output, number: int = 0) -> None:
        self.dispatcher.take(self.link(number), worker_pb2.StepOutputs(outputs=outputs))

    async def settle_down(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def output(index: int, token: int | None = 9, **fields: Any) -> worker_pb2.Output:
    made = worker_pb2.Output(request_id="r", attempt=1, index=index, token=token)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def failed(code: str, retryable: bool, **fields: Any) -> worker_pb2.Output:
    made = output(0, None, end=worker_pb2.FAILED, **fields)
    made.failure.code, made.failure.retryable = code, retryable
    return made


async def texts(generation: Generation) -> list[tuple[int | None, str | None]]:
    return [(each.token, each.finish) for each in await generation.next()]


async def test_a_submission_carries_everything() -> None:
    scene = Scene()
    await scene.start(choices=2, cache_salt=b"s")
    (submit,) = scene.link().submits()
    assert (submit.request_id, submit.attempt, list(submit.prompt)) == ("r", 1, list(PROMPT))
    assert [choice.choice for choice in submit.choices] == [0, 1]
    assert (submit.max_tokens, list(submit.stop_token_ids)) == (9, [1])
    assert submit.cache_salt == b"s" and submit.placement.local and submit.deadline_ms > 0
    assert scene.link().placed_requests == 1


async def test_only_the_next_index_of_the_current_attempt_counts() -> None:
    scene = Scene("decode-0", "decode-1")
    generation = await scene.start()
    scene.give(output(0, 10), output(0, 11), output(1, 12, attempt=2), output(1, 13, choice=5))
    scene.give(output(1, 14, request_id="other"))
    scene.give(output(1, 15), number=1)  # another worker's word for it
    scene.give(output(1, 16))
    assert [each[0] for each in await texts(generation)] == [10, 16]


async def test_the_end_comes_once() -> None:
    scene = Scene()
    generation = await scene.start()
    scene.give(output(0, 10), output(1, 1, end=worker_pb2.STOP), output(2, 12))
    assert await texts(generation) == [(10, None), (1, "stop")]
    assert await texts(generation) == [] and generation.error is None
    assert len(scene.dispatcher) == 0
    assert scene.link().settled == ["r"] and not scene.link().cancels()


async def test_late_ends_of_unknown_requests_are_settled() -> None:
    scene = Scene()
    scene.give(output(3, None, end=worker_pb2.CANCELLED, request_id="gone"))
    assert scene.link().settled == ["gone"]


async def test_cancel_is_told_in_the_same_tick() -> None:
    scene = Scene()
    generation = await scene.start()
    scene.dispatcher.cancel(generation)
    assert scene.link().cancels() == [("r", 1)]
    scene.give(output(0))
    with pytest.raises(Cancelled):
        await generation.next()


async def test_a_full_buffer_ends_the_request_after_what_was_accepted() -> None:
    scene = Scene()
    generation = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(8 * 16 + 1)))
    assert len(await generation.next()) == 8 * 16
    with pytest.raises(Cancelled, match="too slowly"):
        await generation.next()
    assert scene.link().cancels() == [("r", 1)]


async def test_a_loss_goes_on_with_the_accepted_tokens() -> None:
    scene = Scene("decode-0", "decode-1")
    generation = await scene.start()
    scene.give(output(0, 10), output(1, 11))
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    (submit,) = scene.link(1).submits()
    assert submit.attempt == 2 and list(submit.choices[0].accepted) == [10, 11]
    assert list(submit.prompt) == list(PROMPT) and submit.sampling.seed == 1
    scene.give(output(2, 12, attempt=1))  # the dead one's late word
    scene.give(output(2, 13, attempt=2), number=1)
    assert [each[0] for each in await texts(generation)] == [10, 11, 13]


async def test_what_is_on_a_hung_worker_goes_elsewhere_and_is_cancelled_there() -> None:
    scene = Scene("decode-0", "decode-1")
    generation = await scene.start()
    scene.give(output(0, 10))
    scene.dispatcher.hung(scene.link(0))
    scene.dispatcher.hung(scene.link(1))  # it has nothing yet
    await scene.settle_down()
    assert scene.link(0).cancels() == [("r", 1)]
    (submit,) = scene.link(1).submits()
    assert submit.attempt == 2 and list(submit.choices[0].accepted) == [10]
    scene.give(output(1, 11))  # the device came back: its word is of an old attempt
    scene.give(output(1, 12, attempt=2), number=1)
    assert [each[0] for each in await texts(generation)] == [10, 12]


async def test_parts_of_a_request_that_has_failed_are_not_placed_again() -> None:
    """All parts are lost at once, and the first to be told has no attempt left."""
    scene = Scene("decode-0", config=replace(CONFIG, max_attempts=2))
    generation = await scene.start(choices=2)
    scene.give(output(0, 10), output(0, 11, choice=1))
    scene.dispatcher.lost(scene.link(), None, "dead")
    await scene.settle_down()
    assert len(scene.link().submits()) == 3
    scene.dispatcher.lost(scene.link(), None, "dead again")
    await asyncio.sleep(0.1)
    assert generation.over and len(scene.dispatcher) == 0
    assert len(scene.link().submits()) == 3


async def test_an_answer_that_has_begun_stays_with_the_numbers_it_began_with() -> None:
    scene = Scene("decode-0", "decode-1", "decode-2")
    scene.fleet.fingerprints = {"decode-1": "other kernels"}
    generation = await scene.start()
    scene.give(output(0, 10))
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    assert not scene.link(1).submits()  # the lower id, which would have been chosen
    assert [submit.attempt for submit in scene.link(2).submits()] == [2]
    scene.link(2).up = False
    scene.dispatcher.lost(scene.link(2), None, "dead too")
    await asyncio.sleep(scene.dispatcher.place_wait_s + 0.1)
    assert [each.token for each in await generation.next()] == [10]
    with pytest.raises(Unavailable, match=r"as the one that began .*\(fingerprint f, KV in d\)"):
        await generation.next()
    assert not scene.link(1).submits() and len(scene.dispatcher) == 0


async def test_every_choice_stays_once_one_has_begun() -> None:
    scene = Scene("decode-0", "decode-1", "decode-2")
    scene.fleet.fingerprints = {"decode-1": "other kernels"}
    await scene.start(choices=2)
    scene.give(output(0, 10, choice=1))
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    assert not scene.link(1).submits() and len(scene.link(2).submits()) == 2


async def test_an_answer_that_has_not_begun_may_go_anywhere() -> None:
    scene = Scene("decode-0", "decode-1", "decode-2")
    scene.fleet.fingerprints = {"decode-1": "g", "decode-2": "f"}
    await scene.start()
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    assert len(scene.link(1).submits()) == 1
    again = output(0, 10, attempt=2)
    scene.give(again, number=1)  # from here on it is an answer of the other numbers
    scene.link(1).up = False
    scene.dispatcher.lost(scene.link(1), None, "dead")
    await scene.settle_down()
    assert not scene.link(2).submits()
    await scene.dispatcher.close()


async def test_an_end_that_was_lost_is_known_by_the_tokens() -> None:
    for last, finish in ((1, "stop"), (12, "length")):
        scene = Scene()
        generation = await scene.start(max_tokens=2)
        scene.give(output(0, 10), output(1, last))
        scene.dispatcher.lost(scene.link(), ["r"], "not held")
        assert await texts(generation) == [(10, None), (last, None), (None, finish)]
        assert len(scene.link().submits()) == 1 and len(scene.dispatcher) == 0


async def test_choices_that_have_begun_are_placed_one_by_one() -> None:
    scene = Scene()
    await scene.start(choices=3)
    scene.give(output(0, 10, choice=1), output(0, 1, choice=2, end=worker_pb2.STOP))
    scene.dispatcher.lost(scene.link(), ["r"], "not held")
    await scene.settle_down()
    again = scene.link().submits()[1:]
    assert [(submit.request_id, submit.choices[0].choice) for submit in again] == [
        ("r.0", 0),
        ("r.1", 1),
    ]
    assert [list(submit.choices[0].accepted) for submit in again] == [[], [10]]


async def test_choices_that_have_not_begun_stay_together() -> None:
    scene = Scene()
    await scene.start(choices=3)
    scene.give(failed("LeaseLost", True))
    await scene.settle_down()
    assert scene.link().cancels() == [("r", 1)]
    again = scene.link().submits()[1]
    assert (again.request_id, again.attempt, len(again.choices)) == ("r", 2, 3)


async def test_a_resume_names_open_choices_and_their_next_index() -> None:
    scene = Scene()
    generation = await scene.start(choices=3)
    scene.give(output(0, 10, choice=1), output(0, 1, choice=2, end=worker_pb2.STOP))
    scene.dispatcher.finish_choice(generation, 0)
    (resume,) = scene.dispatcher.pending(scene.link())
    assert (resume.request_id, resume.attempt) == ("r", 1)
    assert [(entry.choice, entry.index) for entry in resume.next] == [(1, 1)]


async def test_a_stop_string_ends_one_choice_and_cancels_with_the_last() -> None:
    scene = Scene()
    generation = await scene.start(choices=2)
    scene.dispatcher.finish_choice(generation, 1)
    assert not scene.link().cancels() and not generation.over
    scene.give(output(0, 10, choice=1), output(0, 11, choice=0))
    assert [each[0] for each in await texts(generation)] == [11]
    scene.dispatcher.finish_choice(generation, 0)
    assert scene.link().cancels() == [("r", 1)] and generation.over
    assert generation.error is None


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (failed("EngineError", False), EngineError),
        (failed("InvalidRequest", False), InvalidRequest),
        (failed("NoSuchClass", False), BatonError),
    ],
)
async def test_a_final_failure_ends_the_request(made: Any, kind: type[BatonError]) -> None:
    scene = Scene("decode-0", "decode-1")
    generation = await scene.start()
    scene.give(made)
    with pytest.raises(kind):
        await generation.next()
    assert not scene.link(1).submits() and len(scene.dispatcher) == 0


async def test_attempts_end() -> None:
    scene = Scene()
    generation = await scene.start()
    for attempt in (1, 2, 3):
        scene.give(failed("LeaseLost", True, attempt=attempt))
        await scene.settle_down()
    with pytest.raises(BatonError):
        await generation.next()
    assert [submit.attempt for submit in scene.link().submits()] == [1, 2, 3]


async def test_a_worker_that_gives_up_is_left() -> None:
    scene = Scene("decode-0", "decode-1")
    await scene.start()
    scene.give(output(0, None, end=worker_pb2.CANCELLED))
    await scene.settle_down()
    assert [submit.attempt for submit in scene.link(1).submits()] == [2]


async def test_refusals_before_any_worker_hears() -> None:
    scene = Scene()
    scene.fleet.waiting = 10_000
    with pytest.raises(Overloaded):
        await scene.start()
    scene.fleet.waiting, scene.fleet.total_blocks = 0, 0
    with pytest.raises(InvalidRequest):
        await scene.start()
    scene.link().up = False
    with pytest.raises(Unavailable):
        await scene.start()
    assert not scene.link().sent and len(scene.dispatcher) == 0


async def test_a_worker_that_appears_in_time_is_used() -> None:
    scene = Scene()
    scene.dispatcher.place_wait_s = 20
    scene.link().up = False
    starting = asyncio.create_task(scene.start())
    await scene.settle_down()
    scene.link().up = True
    await starting
    assert len(scene.link().submits()) == 1


async def test_cancelling_a_request_that_waits_for_a_worker_leaves_nothing() -> None:
    scene = Scene()
    scene.dispatcher.place_wait_s = 20
    generation = await scene.start()
    scene.link().up = False
    scene.dispatcher.lost(scene.link(), None, "dead")
    await scene.settle_down()
    scene.dispatcher.cancel(generation)
    scene.link().up = True
    await scene.settle_down()
    await scene.dispatcher.close()
    assert len(scene.link().submits()) == 1 and len(scene.dispatcher) == 0


async def test_what_a_worker_kept_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the buffer holds, before the client had a turn; then it must be taken in time."""
    monkeypatch.setattr(generation_module, "PATIENCE_S", 0.05)
    scene = Scene()
    generation = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(100)))
    assert [each.token for each in await generation.next()] == list(range(100))
    scene.give(*(output(index, index) for index in range(100, 117)))
    await asyncio.sleep(0.06)
    scene.give(output(117, 117))
    assert generation.over
    with pytest.raises(Cancelled, match="too slowly"):
        while True:
            await generation.next()


async def test_an_end_without_a_token_has_room_in_a_full_buffer() -> None:
    scene = Scene()
    generation = await scene.start(max_tokens=200)
    for token in range(8 * 16):
        assert generation.put(OutputToken(0, token))
    assert not generation.put(OutputToken(0, 1))
    assert generation.put(OutputToken(0, None, finish="length"))
    assert (await generation.next())[-1].finish == "length"


async def test_a_router_that_stops_ends_also_what_waits_for_its_first_worker() -> None:
    scene = Scene()
    scene.link().up = False
    waiting = asyncio.create_task(scene.start())
    await asyncio.sleep(0.02)
    scene.dispatcher.end_all()
    for starting in (waiting, asyncio.create_task(scene.start())):
        with pytest.raises(Unavailable, match="stops"):
            await asyncio.wait_for(starting, 2)
    assert len(scene.dispatcher) == 0


async def test_close_ends_everything() -> None:
    scene = Scene()
    generation = await scene.start()
    await scene.dispatcher.close()
    with pytest.raises(Unavailable, match="stops"):
        await generation.next()


async def test_a_deadline_ends_a_request_under_way() -> None:
    scene = Scene()
    generation = await scene.start(within_s=0.1)
    scene.give(output(0, 10))
    assert (await texts(generation))[0][0] == 10
    with pytest.raises(DeadlineExceeded, match="has passed"):
        await generation.next()
    assert scene.link().cancels() == [("r", 1)] and len(scene.dispatcher) == 0
    (submit,) = scene.link().submits()
    assert 0 < submit.deadline_ms <= 100


async def test_a_deadline_ends_the_wait_for_a_first_worker() -> None:
    scene = Scene()
    scene.dispatcher.place_wait_s = 20
    scene.link().up = False
    with pytest.raises(DeadlineExceeded, match="while it waited: no decode worker"):
        await scene.start(within_s=0.1)
    with pytest.raises(DeadlineExceeded):
        await scene.start(within_s=0)  # it was over before it came so far
    assert len(scene.dispatcher) == 0 and not scene.link().sent


async def test_a_deadline_ends_the_wait_between_two_attempts() -> None:
    scene = Scene()
    scene.dispatcher.place_wait_s = 20
    generation = await scene.start(within_s=0.15)
    scene.link().up = False
    scene.dispatcher.lost(scene.link(), None, "dead")
    with pytest.raises(DeadlineExceeded):
        await generation.next()
    scene.link().up = True
    await asyncio.sleep(0.1)
    assert len(scene.link().submits()) == 1 and len(scene.dispatcher) == 0


async def test_a_later_attempt_is_told_what_is_left_of_the_time() -> None:
    scene = Scene("decode-0", "decode-1")
    await scene.start(within_s=5)
    await asyncio.sleep(0.2)
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    (first,), (second,) = scene.link(0).submits(), scene.link(1).submits()
    assert second.deadline_ms <= first.deadline_ms - 200
    await scene.dispatcher.close()


async def test_an_end_before_the_deadline_leaves_no_timer() -> None:
    scene = Scene()
    generation = await scene.start()
    assert generation.timer is not None and not generation.timer.cancelled()
    scene.give(output(0, 1, end=worker_pb2.STOP))
    assert generation.timer.cancelled() and generation.error is None


async def test_a_worker_that_fails_everything_is_not_asked_again_and_again() -> None:
    """It is never busy, so it would be chosen for every request."""
    scene = Scene("decode-0", "decode-1", "decode-2")
    for number in range(40):
        generation = await scene.start(f"r{number}")
        for attempt in (1, 2):
            name = next(n for n in (0, 1, 2) if held(scene, n, f"r{number}", attempt))
            if name == 0:
                made = failed("EngineError", True, request_id=f"r{number}", attempt=attempt)
                scene.give(made, number=0)
                await scene.settle_down()
            else:
                last = output(0, 1, end=worker_pb2.STOP, request_id=f"r{number}")
                last.attempt = attempt
                scene.give(last, number=name)
                break
        assert generation.over and generation.error is None
    assert len(scene.link(0).submits()) == 5
    assert scene.dispatcher._circuits.counts(asyncio.get_running_loop().time())["open"] == 1


def held(scene: Scene, number: int, request_id: str, attempt: int) -> bool:
    return (request_id, attempt) in {
        (submit.request_id, submit.attempt) for submit in scene.link(number).submits()
    }


async def test_busy_and_draining_workers_are_no_outliers() -> None:
    scene = Scene("decode-0", "decode-1", "decode-2")
    for code in ("Overloaded", "Draining", "InvalidRequest"):
        for number in range(8):
            await scene.start(f"{code}{number}")
            made = failed(code, code != "InvalidRequest", request_id=f"{code}{number}")
            scene.give(made, number=0)
            await scene.settle_down()
            scene.link(0).load.draining = False
    now_s = asyncio.get_running_loop().time()
    assert scene.dispatcher._circuits.counts(now_s)["open"] == 0
    await scene.dispatcher.close()


def failures(scene: Scene, among: int) -> list[str]:
    """The requests that a worker now holds fail there; their ids."""
    failing = []
    for number in range(among):
        link = scene.link(number)
        for submit in [*link.submits()]:
            failing.append(submit.request_id)
            made = failed("EngineError", True, request_id=submit.request_id)
            made.attempt = submit.attempt
            scene.give(made, number=number)
        link.sent.clear()
    return failing


async def test_a_fleet_that_fails_everything_is_not_stormed() -> None:
    """Of 200 requests that fail wherever they are, a fifth is moved in all; the others end at
    once with the time to wait."""
    scene = Scene("decode-0", "decode-1")
    generations = [await scene.start(f"r{number}") for number in range(200)]
    assert len(failures(scene, among=2)) == 200
    moved = 0
    for _ in range(4):
        await asyncio.sleep(0.12)
        moved += len(failures(scene, among=2))
    assert moved <= 40 + 10
    assert len(scene.dispatcher) == 0  # nobody is left waiting
    kinds = set()
    for generation in generations:
        with pytest.raises(BatonError) as ended:
            await generation.next()
        kinds.add(type(ended.value))
        if isinstance(ended.value, Overloaded):
            assert 0 < ended.value.retry_after_s <= 10
    assert Overloaded in kinds


async def test_a_burst_of_losses_is_paced_and_none_is_refused() -> None:
    scene = Scene("decode-0", "decode-1")
    generations = [await scene.start(f"r{number}") for number in range(100)]
    dying = scene.link(0)
    lost = {submit.request_id for submit in dying.submits()}
    assert len(lost) == 100
    dying.up = False
    scene.dispatcher.lost(dying, None, "dead")
    seen: list[int] = []
    answered: set[str] = set()
    async with asyncio.timeout(20):
        while answered != lost:
            await asyncio.sleep(0.02)
            fresh = [s for s in scene.link(1).submits() if s.attempt == 2]
            fresh = [submit for submit in fresh if submit.request_id not in answered]
            seen.append(len(fresh))
            for submit in fresh:
                answered.add(submit.request_id)
                made = output(0, 10, attempt=2, request_id=submit.request_id)
                scene.give(made, number=1)
    assert max(seen) <= 20  # a fifth of a hundred at once
    assert not any(generation.over for generation in generations)
    await scene.dispatcher.close()


async def test_a_client_that_leaves_gives_its_turn_back() -> None:
    scene = Scene("decode-0", "decode-1", config=replace(CONFIG, move_floor=1, move_share=0.0))
    first, second = await scene.start("a"), await scene.start("b")
    for number in (0, 1):
        scene.dispatcher.lost(scene.link(number), None, "dead")
    await asyncio.sleep(0.1)
    again = [s.request_id for n in (0, 1) for s in scene.link(n).submits() if s.attempt == 2]
    assert len(again) == 1
    scene.dispatcher.cancel(first if again == ["a"] else second)
    await asyncio.sleep(0.1)
    again = [s.request_id for n in (0, 1) for s in scene.link(n).submits() if s.attempt == 2]
    assert sorted(again) == ["a", "b"]
    await scene.dispatcher.close()


async def test_only_the_first_end_counts() -> None:
    request = GenerationRequest(PROMPT, worker_pb2.Sampling(), max_tokens=1)
    generation = Generation("r", request, 4, asyncio.get_running_loop().time() + 50)
    generation.put(OutputToken(0, 3))
    generation.end(WorkerLost("first"))
    generation.end()
    assert [each.token for each in await generation.next()] == [3]
    with pytest.raises(WorkerLost, match="first"):
        await generation.next()


async def test_what_a_draining_worker_hands_back_goes_on_and_counts_as_no_failure() -> None:
    scene = Scene("decode-0", "decode-1")
    generation = await scene.start()
    scene.give(output(0, 10))
    scene.give(failed("Draining", True))
    await scene.settle_down()
    (again,) = scene.link(1).submits()
    assert (again.attempt, list(again.choices[0].accepted)) == (2, [10])
    scene.link(0).load.draining = False  # it has been started anew
    for attempt in range(2, 8):  # far more than max_attempts
        here = (attempt + 1) % 2
        scene.give(failed("Draining", True, attempt=attempt), number=here)
        scene.link(1 - here).load.draining = False
        await scene.settle_down()
        assert scene.link(1 - here).submits()[-1].attempt == attempt + 1
    assert not generation.over
    for attempt in (8, 9):  # but failures do, as ever
        assert not generation.over
        here = 0 if scene.link(0).submits()[-1].attempt == attempt else 1
        scene.link(0).load.draining = scene.link(1).load.draining = False
        scene.give(failed("EngineError", True, attempt=attempt), number=here)
        await scene.settle_down()
    here = 0 if scene.link(0).submits()[-1].attempt == 10 else 1
    scene.give(failed("EngineError", True, attempt=10), number=here)
    assert generation.over and isinstance(generation.error, EngineError)


async def test_a_worker_that_refuses_as_draining_gets_nothing_more_at_once() -> None:
    """Its load may say so only later: nothing may be placed there in between."""
    scene = Scene("decode-0", "decode-1")
    await scene.start()
    scene.give(failed("Draining", True))
    await scene.settle_down()
    await scene.start("second")
    assert len(scene.link(0).submits()) == 1 and len(scene.link(1).submits()) == 2


async def test_requests_on_a_link_that_leaves_in_a_drain_are_no_failures() -> None:
    scene = Scene("decode-0", "decode-1")
    generation = await scene.start()
    scene.link(0).load.draining = True
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "it left")
    await scene.settle_down()
    (submission,) = scene.dispatcher._submissions.values()
    assert (submission.attempt, submission.drains, submission.failures) == (2, 1, 1)
    assert not generation.over
