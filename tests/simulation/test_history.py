"""What a client asks and what it should be given, without any fleet."""

from __future__ import annotations

import pytest

from baton.simulation.fleet.history import FINISHED, Ask, History


def ask(**wishes: object) -> Ask:
    made = Ask(router="r0", prompt=tuple(range(13)), max_tokens=9)
    for name, value in wishes.items():
        object.__setattr__(made, name, value)
    return made


def test_a_request_says_all_that_the_client_wants() -> None:
    request = ask(temperature=0.5, seed=7, stops=(1, 2), salt=b"s", choices=3).request()
    assert request.prompt == tuple(range(13)) and request.max_tokens == 9
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)
    assert request.stop_token_ids == (1, 2) and request.cache_salt == b"s"
    assert request.choices == 3


def test_what_is_expected_ends_with_the_first_stop_token() -> None:
    whole = ask().expected(0)
    assert len(whole) == 9
    assert ask(stops=(whole[4],)).expected(0) == whole[: whole.index(whole[4]) + 1]
    assert ask(stops=(whole[-1] + 1_000_000,)).expected(0) == whole


def test_choices_differ_with_a_temperature_and_seeds_too() -> None:
    greedy = [ask().expected(choice) for choice in range(3)]
    drawn = [ask(temperature=1.0).expected(choice) for choice in range(3)]
    assert greedy[0] == greedy[1] == greedy[2]
    assert drawn[0] != drawn[1] != drawn[2]
    assert ask(temperature=1.0, seed=2).expected(0) != drawn[0]


def test_a_penalty_makes_draws_hang_on_the_history() -> None:
    plain, penalised = ask(), ask(penalty=1.5)
    assert plain.request().sampling.repetition_penalty == 1.0
    assert penalised.request().sampling.repetition_penalty == 1.5
    assert plain.expected(0) != penalised.expected(0) == ask(penalty=1.5).expected(0)


@pytest.mark.parametrize("choices", [1, 3])
def test_a_history_has_a_slot_per_choice_and_keeps_every_end(choices: int) -> None:
    history = History(ask(choices=choices), 12)
    assert history.request_id == "req-12"
    assert history.tokens == [[]] * choices and history.finishes == [[]] * choices
    history.tokens[0].append(5)
    assert [len(tokens) for tokens in history.tokens] == [1] + [0] * (choices - 1)
    history.end(FINISHED, 4.0)
    history.end("WorkerLost", 5.0, "d0")
    assert history.ends == [FINISHED, "WorkerLost"] and history.detail == "d0"
