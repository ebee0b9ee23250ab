"""The indices of attempts against a plain list of them."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context

from baton.router.dispatch.active_request import ActiveRequest
from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.attempts import Attempts
from baton.router.fleet.worker_link import WorkerLink
from tests.support.router_books import keeps_nothing

NAMES = ["a", "b", "c", "d", "e"]
OWNERS = [cast(ActiveRequest, f"active_request {number}") for number in range(3)]
LINKS = [cast(WorkerLink, f"link {number}") for number in range(3)]
_STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.sampled_from(OWNERS)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("assign"), st.sampled_from(NAMES), st.sampled_from([None, *LINKS])),
)


@given(st.lists(_STEPS, max_size=60))
def test_answers_are_those_of_a_plain_list(
    steps: list[tuple[str, str, ActiveRequest | WorkerLink | None]],
) -> None:
    attempts, plain = Attempts(), cast(dict[str, Attempt], {})
    gone: list[Attempt] = []
    for step, name, other in steps:
        if step == "add" and name not in plain:
            plain[name] = Attempt(name, cast(ActiveRequest, other), {0}, Context())
            attempts.add(plain[name])
        elif step == "remove":
            attempts.remove(name)
            gone += [plain.pop(name)] if name in plain else []
        elif step == "assign" and name in plain:
            attempts.assign(plain[name], cast(WorkerLink, other))
        assert list(attempts.values()) == list(plain.values())
        for owner in OWNERS:
            assert attempts.of(owner) == [e for e in plain.values() if e.active_request is owner]
        for link in LINKS:
            assert attempts.on(link) == [e for e in plain.values() if e.link is link]
    for name in list(plain):
        attempts.remove(name)
    for left in gone:
        attempts.assign(left, None)
    assert keeps_nothing(attempts)


def test_removed_attempt_is_on_no_link() -> None:
    attempts = Attempts()
    attempt = Attempt("a", OWNERS[0], {0}, Context())
    attempts.add(attempt)
    attempts.remove("a")
    attempts.assign(attempt, LINKS[0])
    assert attempts.on(LINKS[0]) == [] and attempt.link is LINKS[0]
