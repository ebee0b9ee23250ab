"""The peers' side of the pipe: what each request does to an engine, and what is answered."""

from __future__ import annotations

import io
import json

import pytest

from tests.support.json_values import Json


class Scripted:
    """Each sequence draws its first token after as many steps as its prompt has tokens."""

    def __init__(self) -> None:
        self.steps = 0
        self.waits: dict[str, int] = {}

    def facts(self) -> dict[str, str]:
        return {"kv": "bf16"}

    def add(self, prompt: list[int]) -> str:
        name = f"sequence {len(self.waits)}"
        self.waits[name] = len(prompt)
        return name

    def step(self) -> dict[str, int]:
        self.steps += 1
        self.waits = {name: wait - 1 for name, wait in self.waits.items()}
        return {name: 100 - wait for name, wait in self.waits.items() if wait <= 0}

    def drop(self) -> None:
        self.waits.clear()


def asked(monkeypatch: pytest.MonkeyPatch, engine: Scripted, *requests: object) -> list[Json]:
    from benchmarks.peers.request_loop import answer

    answers = io.StringIO()
    answer(engine, [json.dumps(request) + "\n" for request in requests], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_hold_steps_until_all_have_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    hold = {"do": "hold", "prompts": [[1, 2, 3], [4]]}
    (answer,) = asked(monkeypatch, engine, hold)
    assert engine.steps == 3
    assert answer["first"] == [100, 100]  # not the third token of the shorter one
    assert answer["seconds"] > 0
    assert list(engine.waits.values()) == [0, -2]


def test_steps_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    hold = {"do": "hold", "prompts": [[1]]}
    _, answer = asked(monkeypatch, engine, hold, {"do": "steps", "count": 4})
    assert len(answer["seconds"]) == 4
    assert all(seconds > 0 for seconds in answer["seconds"])
    assert engine.steps == 5


def test_drop_ends_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    hold = {"do": "hold", "prompts": [[1], [1]]}
    answers = asked(monkeypatch, engine, hold, {"do": "drop"}, {"do": "hold", "prompts": [[7]]})
    assert answers[1] == {}
    assert len(answers[2]["first"]) == 1
    assert len(engine.waits) == 1


def test_another_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'prefill' is none of hold, steps and drop"):
        asked(monkeypatch, Scripted(), {"do": "prefill"})


def test_what_a_peer_is_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers.request_loop import options

    given = ["folder", "--threads=2", "--kv-gib=3", "--step-tokens=2048", "--sequences=32"]
    assert vars(options(given)) == {
        "model": "folder",
        "threads": 2,
        "kv_gib": 3,
        "step_tokens": 2048,
        "sequences": 32,
    }
    with pytest.raises(SystemExit):
        options(["folder"])
