"""Episodes about numbers: sums and differences to two digits, days of the week, units.

Operands are repeated before a result, so that a small model finds the digits side by side.
A sum is on one side of the split whatever its wording; days and the short tables of units
differ between the sides in the person asked about, since there are too few of them to split.
"""

from __future__ import annotations

from baton.models.corpus.conversation import Episode, Scene, exchange
from baton.models.corpus.words import DAYS, MONTHS, NAMES, THINGS

_SCALED = (  # many of the small one make one of the large one
    ("centimetres", "metres", 100),
    ("metres", "kilometres", 1000),
    ("grams", "kilograms", 1000),
    ("millimetres", "centimetres", 10),
    ("millilitres", "litres", 1000),
)
_TABLES = (
    ("minutes", "hours", 60, 9),
    ("days", "weeks", 7, 9),
    ("hours", "days", 24, 5),
    ("months", "years", 12, 9),
    ("seconds", "minutes", 60, 9),
)


def arithmetic(scene: Scene) -> Episode:
    """One to four sums or differences; some are worded as a small story."""
    choose = scene.choose
    texts: list[str] = []
    for _ in range(choose.randint(1, 4)):
        texts += _story_sum(scene) if choose.random() < 0.25 else _plain_sum(scene)
    return exchange("arithmetic", *texts)


def operands(scene: Scene, sign: str) -> tuple[int, int]:
    """Draw two operands, in an order of their own: a + b and b + a are one content."""
    choose = scene.choose
    limit = 100 if choose.random() < 0.8 else 10
    first, second = scene.fresh(
        f"{sign}", lambda: _ordered(choose.randrange(limit), choose.randrange(limit))
    )
    return (first, second) if sign == "-" or choose.random() < 0.5 else (second, first)


def _ordered(one: int, other: int) -> tuple[int, int]:
    return max(one, other), min(one, other)


def result(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


def _plain_sum(scene: Scene) -> tuple[str, str]:
    sign = scene.choose.choice("+-")
    left, right = operands(scene, sign)
    word = "plus" if sign == "+" else "minus"
    asked = scene.choose.choice(
        (
            f"What is {left} {sign} {right}?",
            f"What is {left} {word} {right}?",
            f"How much is {left} {sign} {right}?",
            f"{left} {sign} {right} =",
        )
    )
    return asked, f"{left} {sign} {right} = {result(left, sign, right)}"


def _story_sum(scene: Scene) -> tuple[str, str]:
    choose = scene.choose
    sign = choose.choice("+-")
    left, right = operands(scene, sign)
    name, things = choose.choice(NAMES), choose.choice(THINGS)
    event = "gets" if sign == "+" else "loses"
    question = f"A child has {left} {things} and {event} {right}. How many {things} does it have?"
    if choose.random() < 0.5:
        question = f"In a game {name} wins {left} {things} and {event} {right}. How many {things}?"
    total = result(left, sign, right)
    return question, f"{left} {sign} {right} = {total}, so {total} {things}."


def days(scene: Scene) -> Episode:
    """Which day follows, and what day it is some days later or earlier."""
    choose = scene.choose
    texts: list[str] = []
    for _ in range(choose.randint(1, 3)):
        texts += choose.choice((_later, _next))(scene)
    return exchange("days", *texts)


def _later(scene: Scene) -> tuple[str, str]:
    choose = scene.choose
    name, day, count, later = scene.fresh(
        "days",
        lambda: (
            choose.choice(NAMES), choose.randrange(7), choose.randint(1, 6), choose.random() < 0.5,
        ),
    )  # fmt: skip
    many = f"{count} day" if count == 1 else f"{count} days"
    found = DAYS[(day + (count if later else -count)) % 7]
    if later:
        return f"Today is {DAYS[day]}. {name} comes in {many}. Which day?", f"On {found}."
    return f"Today is {DAYS[day]}. {name} came {many} ago. Which day?", f"On {found}."


def _next(scene: Scene) -> tuple[str, str]:
    choose = scene.choose
    names, word = choose.choice(((DAYS, "day"), (MONTHS, "month")))
    name, at, side = scene.fresh(
        "next",
        lambda: (choose.choice(NAMES), choose.randrange(len(names)), choose.choice((1, -1))),
    )
    before = "after" if side == 1 else "before"
    asked = _asked(scene, name, f"which {word} comes {before} {names[at]}?")
    return asked, f"{names[(at + side) % len(names)]} comes {before} {names[at]}."


def _asked(scene: Scene, name: str, question: str) -> str:
    """Add the name that tells the sides of the split apart; in training, leave it out of half."""
    if scene.held_out or scene.choose.random() < 0.5:
        return f"{name} asks: {question}"
    return question[0].upper() + question[1:]


def units(scene: Scene) -> Episode:
    """How many of a small unit are in some of a large one."""
    texts: list[str] = []
    for _ in range(scene.choose.randint(1, 3)):
        texts += _scaled(scene) if scene.choose.random() < 0.6 else _table(scene)
    return exchange("units", *texts)


def _scaled(scene: Scene) -> tuple[str, str]:
    choose = scene.choose
    kind, count = scene.fresh(
        "units", lambda: (choose.randrange(len(_SCALED)), choose.randint(2, 99))
    )
    small, large, many = _SCALED[kind]
    asked = (f"How many {small} are {count} {large}?", f"What are {count} {large} in {small}?")
    return choose.choice(asked), f"{count} {large} are {count * many} {small}."


def _table(scene: Scene) -> tuple[str, str]:
    choose = scene.choose

    def draw() -> tuple[str, int, int]:
        kind = choose.randrange(len(_TABLES))
        return choose.choice(NAMES), kind, choose.randint(2, _TABLES[kind][3])

    name, kind, count = scene.fresh("tables", draw)
    small, large, many, _ = _TABLES[kind]
    asked = _asked(scene, name, f"how many {small} are {count} {large}?")
    if choose.random() < 0.5:
        asked = f"{name} waits {count} {large}. How many {small} is that?"
    return asked, f"{count} {large} are {count * many} {small}."
