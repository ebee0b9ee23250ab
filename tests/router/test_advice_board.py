"""Posted advice: only what is known of it is kept, within bounds, and not for ever."""

from __future__ import annotations

import copy

import orjson
import pytest

from baton.router.console.advice_board import (
    EXPIRES_S,
    MAX_ALTERNATIVES,
    MAX_CHARACTERS,
    MAX_FINDINGS,
    AdviceBoard,
)
from baton.runtime.errors import InvalidRequest
from tests.router.test_console import ADVICE
from tests.support.json_values import Json, JsonObject


class Board:
    """A board, and the clock that it reads."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.board = AdviceBoard(lambda: self.now_s)

    def post(self, body: Json) -> None:
        self.board.post(orjson.dumps(body))


def changed(*path: str | int, to: Json) -> JsonObject:
    """Return the advice with another value at the path."""
    made = copy.deepcopy(ADVICE)
    parent: Json = made
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = to
    return made


def test_advice_is_shown_until_it_is_old() -> None:
    scene = Board()
    assert scene.board.shown() is None
    scene.post(ADVICE)
    scene.now_s += EXPIRES_S
    assert scene.board.shown() == ADVICE
    scene.now_s += 1
    assert scene.board.shown() is None


@pytest.mark.parametrize(
    "body",
    [
        [],
        changed("time", to="now"),
        changed("error", to=True),
        changed("findings", to={}),
        changed("findings", to=ADVICE["findings"] * (MAX_FINDINGS + 1)),
        changed("findings", 0, to="a text"),
        changed("findings", 0, "level", to="great"),
        changed("findings", 0, "text", to="x" * (MAX_CHARACTERS + 1)),
        changed("ratios", to=ADVICE["ratios"] * 2),
        changed("ratios", 0, "obstacle", to=None),
        changed("ratios", 1, "good_share", to="0.6"),
        changed("alternatives", to=ADVICE["alternatives"] * (MAX_ALTERNATIVES + 1)),
        changed("alternatives", 0, "how", to=None),
        changed("alternatives", 0, "good_share", to=None),
        changed("alternatives", 0, "low", to="0.5"),
    ],
)
def test_a_wrong_field_is_refused_and_the_last_advice_stays(body: JsonObject) -> None:
    scene = Board()
    scene.post(ADVICE)
    with pytest.raises(InvalidRequest):
        scene.post(body)
    assert scene.board.shown() == ADVICE


@pytest.mark.parametrize("body", [b"", b"no JSON", b'{"time": NaN}', b"\xff"])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is not JSON"):
        Board().board.post(body)
