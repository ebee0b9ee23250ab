"""What a router is owed: outputs are kept until it has settled, and come again after a break."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from baton.decode_worker import sessions
from baton.proto import worker_pb2
from baton.runtime.errors import InvalidRequest
from tests.support.session_scene import Work, asked, hello, indices, resume, submit


async def test_outputs_of_one_moment_travel_in_one_message() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    session.receive(submit("b"))
    work.token("a", 0)
    work.token("b", 0)
    work.token("a", 1)
    assert await indices(session) == [0, 0, 1]


async def test_a_cancel_may_name_choices_and_settling_ends_the_others() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a", choices=3))
    cancel = worker_pb2.Cancel(request_id="a", attempt=1, choices=[1])
    session.receive(worker_pb2.RouterMessage(cancel=cancel))
    assert work.cancelled == [("a", 1, [1])]
    settled = worker_pb2.Settled(request_ids=["a"])  # of the others no cancel ever came
    session.receive(worker_pb2.RouterMessage(settled=settled))
    assert work.cancelled == [("a", 1, [1]), ("a", 1)]


async def test_another_attempt_is_another_request() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a", attempt=1))
    session.receive(submit("a", attempt=2))
    assert work.cancelled == [("a", 1)]
    work.token("a", 0, attempt=1)  # late
    work.token("a", 0, attempt=2)
    outputs = await session.outputs()
    assert [o.attempt for o in outputs.outputs] == [2]
    session.receive(submit("a", attempt=1))  # later still
    assert work.cancelled == [("a", 1)]


async def test_settled_requests_are_forgotten() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    work.token("a", 0, end=worker_pb2.STOP)
    settled = worker_pb2.Settled(request_ids=["a"])
    session.receive(worker_pb2.RouterMessage(settled=settled))
    session.detach()
    _, lost = work.sessions.attach(hello(resume("a", 0)))
    assert lost == ["a"] and work.cancelled == []


def confirmed(*accepted: worker_pb2.Resume) -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(settled=worker_pb2.Settled(accepted=accepted))


async def test_accepted_outputs_are_forgotten_and_all_others_kept() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    for index in range(1000):
        work.token("a", index)
        if index % 100 == 99:
            session.receive(confirmed(resume("a", index - 9)))
            assert work.kept("a") == list(range(index - 9, index + 1))
    session.detach()
    again, lost = work.sessions.attach(hello(resume("a", 995)))
    assert lost == [] and await indices(again) == [995, 996, 997, 998, 999]
    again.receive(confirmed(resume("a", 990)))  # late: it was true, and still is
    work.token("a", 1000, end=worker_pb2.LENGTH)
    assert await indices(again) == [1000] and work.kept("a") == [995, 996, 997, 998, 999, 1000]


async def test_an_end_is_kept_until_it_is_settled() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    work.token("a", 0)
    work.token("a", 1, end=worker_pb2.STOP)
    session.receive(confirmed(resume("a", 2)))  # as if its end had not been understood
    assert work.kept("a") == [1]


async def test_only_this_attempts_acknowledgement_forgets_outputs() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a", attempt=2, choices=2))
    for choice in (0, 1):
        work.token("a", 0, attempt=2, choice=choice)
    session.receive(confirmed(resume("a", 1, attempt=1), resume("absent", 1)))
    assert work.kept("a") == [0, 0]
    session.receive(confirmed(resume("a", 0, attempt=2)))  # nothing of choice 1 is waited for
    assert work.kept("a") == [0] and work.cancelled == []


async def test_a_refused_submit_ends_every_choice_with_its_reason() -> None:
    work = Work()
    work.fails = InvalidRequest("max_tokens is 0", field="max_tokens")
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a", choices=3))
    reported = [(o.choice, o.failure.code, o.end) for o in (await session.outputs()).outputs]
    assert reported == [(number, "InvalidRequest", worker_pb2.FAILED) for number in range(3)]


@pytest.mark.parametrize("mistake", [RuntimeError, ValueError, TypeError, OverflowError, KeyError])
async def test_a_submit_that_goes_wrong_ends_alone_and_at_once(mistake: type[Exception]) -> None:
    work = Work()  # the mistake is its own: no client is told that his request was wrong
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    work.fails = mistake("this cannot be")
    with capture_logs() as reported:
        session.receive(submit("b", choices=2))
    said = [(e["request_id"], e["exc_info"]) for e in reported if e["log_level"] == "error"]
    assert said == [("b", True)]  # with its traceback
    assert work.cancelled == [("b", 1)]  # what had begun
    outputs = (await session.outputs()).outputs
    assert [(o.choice, o.end) for o in outputs] == [(c, worker_pb2.FAILED) for c in (0, 1)]
    assert {(o.failure.code, o.failure.retryable) for o in outputs} == {("EngineError", True)}
    work.token("a", 0)
    assert await indices(session) == [0]


async def test_cancel_needs_the_current_attempt() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a", attempt=2))
    for attempt in (1, 3):
        cancel = worker_pb2.Cancel(request_id="a", attempt=attempt)
        session.receive(worker_pb2.RouterMessage(cancel=cancel))
    assert work.cancelled == []
    cancel = worker_pb2.Cancel(request_id="a", attempt=2)
    session.receive(worker_pb2.RouterMessage(cancel=cancel))
    assert work.cancelled == [("a", 2)]


async def test_two_routers_do_not_see_each_other() -> None:
    work = Work()
    one, _ = work.sessions.attach(hello(boot=b"1" * 16))
    two, lost = work.sessions.attach(hello(resume("a", 0), boot=b"2" * 16))
    one.receive(submit("a"))
    assert lost == ["a"]
    work.token("a", 0)
    assert await indices(one) == [0]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.outputs(), 0.02)


async def test_a_cancel_of_a_refused_request_has_no_effect() -> None:
    """Its id may be in use by another router's request."""
    work = Work()
    work.fails = InvalidRequest("max_tokens is 0", field="max_tokens")
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    cancel = worker_pb2.Cancel(request_id="a", attempt=1)
    session.receive(worker_pb2.RouterMessage(cancel=cancel))
    assert work.cancelled == []


async def test_a_long_backlog_comes_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_MESSAGE_OUTPUTS", 3)
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a"))
    first.detach()
    for index in range(7):
        work.token("a", index)
    second, _ = work.sessions.attach(hello(resume("a", 0)))
    assert [await indices(second) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]


async def test_a_candidate_is_sent_without_outputs_and_only_the_last() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    session.receive(submit("b"))
    waiting = asyncio.create_task(asked(session))
    await asyncio.sleep(0)
    work.asked("a", b"one")
    assert await waiting == [("a", b"one", False)]
    for name in (b"two", b"", b"three"):
        work.asked("a", name)
    work.asked("b", b"one")
    assert await asked(session) == [("a", b"three", False), ("b", b"one", False)]


async def test_an_output_after_it_says_that_nothing_is_waited_for() -> None:
    """Both travel in one message, whose outputs are read first."""
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    work.token("a", 0)
    work.asked("a", b"one")
    assert await asked(session) == [("a", b"one", False)]  # its blocks were lost after that
    work.asked("a", b"two")
    work.token("a", 1)
    assert await asked(session) == [("a", b"two", True)]
