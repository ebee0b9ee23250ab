"""Decode credit: what a group is promised, and when a promise may be made."""

from __future__ import annotations

from baton.decode_worker import credit
from baton.decode_worker.sequences import Group, Sequence
from tests.support.scripted_request import scripted_request

SIZE = 4


def group(prompt: int, max_tokens: int = 100, choices: int = 1, arrived: float = 0.0) -> Group:
    request = scripted_request(list(range(prompt)), n=choices, at_s=arrived, max_tokens=max_tokens)
    made = Group(request, request.sequences, request.prompt, [], local="placed")
    credit.promise(made, SIZE, expected_growth_tokens=8)
    return made


def test_a_promise_is_the_prompt_and_its_expected_growth() -> None:
    assert group(10).sequences[0].promised == 5  # 18 tokens
    assert group(10, max_tokens=2).sequences[0].promised == 3  # it cannot grow by more


def test_siblings_share_the_full_blocks_of_the_prompt() -> None:
    promised = [(s.promised, s.shared) for s in group(10, choices=3).sequences]
    assert promised == [(5, 0), (3, 2), (3, 2)]


def test_a_sequence_beyond_its_promise_counts_its_own_blocks() -> None:
    sequence = group(10).sequences[0]
    assert credit.outstanding([sequence]) == 5
    sequence.blocks = list(range(9))
    assert credit.outstanding([sequence]) == 9
    sequence.ended = True
    assert credit.outstanding([sequence]) == 0


def may_grant(
    wanted: Group, usable: int, running: list[Sequence], waiting: list[Group], share: float
) -> bool:
    return credit.may_grant(
        wanted,
        running=running,
        waiting_grants=waiting,
        usable_blocks=usable,
        waiting_share=share,
    )


def test_a_grant_fits_beside_all_others_or_waits() -> None:
    running = group(10).sequences  # 5 blocks
    assert may_grant(group(10), 10, running, [], 1.0)
    assert not may_grant(group(10), 9, running, [], 1.0)


def test_waiting_grants_have_a_share_but_one_is_always_possible() -> None:
    assert may_grant(group(30), 10, [], [], 0.1)
    assert not may_grant(group(10), 20, [], [group(10)], 0.4)
    assert may_grant(group(10), 20, [], [group(10)], 0.5)
