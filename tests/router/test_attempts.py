"""The indices of submissions against a plain list of them."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context

from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.attempts import Attempts

NAMES = ["a", "b", "c", "d", "e"]
OWNERS = [cast(Any, f"generation {number}") for number in range(3)]
LINKS = [cast(Any, f"link {number}") for number in range(3)]
_STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.sampled_from(OWNERS)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("assign"), st.sampled_from(NAMES), st.sampled_from([None, *LINKS])),
)


@given(st.lists(_STEPS, max_size=60))
def test_answers_are_those_of_a_plain_list(steps: list[tuple[str, str, Any]]) -> None:
    submissions, plain = Attempts(), cast(dict[str, Attempt], {})
    gone: list[Attempt] = []
    for step, name, other in steps:
        if step == "add" and name not in plain:
            plain[name] = Attempt(name, other, {0}, Context())
            submissions.add(plain[name])
        elif step == "remove":
            submissions.remove(name)
            gone += [plain.pop(name)] if name in plain else []
        elif step == "assign" and name in plain:
            submissions.assign(plain[name], other)
        assert list(submissions.values()) == list(plain.values())
        for owner in OWNERS:
            assert submissions.of(owner) == [e for e in plain.values() if e.generation is owner]
        for link in LINKS:
            assert submissions.on(link) == [e for e in plain.values() if e.link is link]
    for name in list(plain):
        submissions.remove(name)
    for left in gone:
        submissions.assign(left, None)
    assert not submissions._by_generation and not submissions._by_link


def test_removed_submission_is_on_no_link() -> None:
    submissions = Attempts()
    submission = Attempt("a", OWNERS[0], {0}, Context())
    submissions.add(submission)
    submissions.remove("a")
    submissions.assign(submission, LINKS[0])
    assert submissions.on(LINKS[0]) == [] and submission.link is LINKS[0]
