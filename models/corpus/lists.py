"""Episodes about short lists: copying, reversing, sorting, counting, and single items.

Answers begin with fixed words, so that each item stands after a space as it does in the
question. A list's items, in their order, are its content: no held-out list is ever trained on.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.models.corpus.conversation import Episode, Scene, exchange
from baton.models.corpus.words import ANIMALS, COLOURS, FOODS, OBJECTS, ORDINALS

Pair = tuple[str, str]
_KINDS = (OBJECTS, ANIMALS, FOODS, COLOURS)


def lists(scene: Scene) -> Episode:
    """One to three questions, each about a list of its own."""
    texts: list[str] = []
    for _ in range(scene.choose.randint(1, 3)):
        texts += scene.choose.choice(_QUESTIONS)(scene)
    return exchange("lists", *texts)


def _items(scene: Scene, most: int, *, repeated: bool = False) -> tuple[str, ...]:
    """Words of one kind, or numbers, three to `most` of them."""
    choose = scene.choose
    words = choose.choice(_KINDS)
    numbers = choose.random() < 0.3

    def draw() -> tuple[str, ...]:
        count = choose.randint(3, most)
        if numbers:
            return tuple(str(number) for number in choose.sample(range(1, 100), count))
        if repeated:
            few = choose.sample(words, 3)
            return tuple(choose.choice(few) for _ in range(count))
        return tuple(choose.sample(words, count))

    return scene.fresh("list", draw)


def _asked(scene: Scene, orders: tuple[str, ...], items: tuple[str, ...]) -> str:
    return f"{scene.choose.choice(orders)}: {', '.join(items)}"


def _copy(scene: Scene) -> Pair:
    items = _items(scene, 6)
    asked = _asked(scene, ("Copy this list", "Repeat this list", "Say after me"), items)
    return asked, f"The list is {', '.join(items)}."


def _reverse(scene: Scene) -> Pair:
    items = _items(scene, 5)
    asked = _asked(scene, ("Reverse this list", "Say this list backwards"), items)
    return asked, f"Reversed it is {', '.join(items[::-1])}."


def _sort(scene: Scene) -> Pair:
    items = _items(scene, 5)
    numbers = items[0].isdigit()
    ordered = sorted(items, key=lambda item: int(item)) if numbers else sorted(items)
    asked = _asked(scene, ("Sort this list", "Put this list in order"), items)
    return asked, f"Sorted it is {', '.join(ordered)}."


def _count(scene: Scene) -> Pair:
    items = _items(scene, 8)
    asked = _asked(scene, ("How many items are in this list", "Count this list"), items)
    return asked, f"There are {len(items)} items."


def _times(scene: Scene) -> Pair:
    items = _items(scene, 7, repeated=True)
    item = scene.choose.choice(items)
    asked = _asked(scene, (f"How many times is {item} in this list",), items)
    return asked, f"The word {item} is there {items.count(item)} times."


def _item_at(scene: Scene) -> Pair:
    items = _items(scene, 5)
    at = scene.choose.randrange(len(items))
    word = "last" if at == len(items) - 1 else ORDINALS[at]
    asked = _asked(scene, (f"What is the {word} item of this list",), items)
    return asked, f"The {word} item is {items[at]}."


def _largest(scene: Scene) -> Pair:
    choose = scene.choose
    items = scene.fresh(
        "list", lambda: tuple(str(n) for n in choose.sample(range(1, 100), choose.randint(2, 5)))
    )
    largest = choose.random() < 0.5
    word = "largest" if largest else "smallest"
    found = (max if largest else min)(items, key=lambda item: int(item))
    asked = _asked(scene, (f"What is the {word} number of this list",), items)
    return asked, f"The {word} number is {found}."


_QUESTIONS: tuple[Callable[[Scene], Pair], ...] = (
    _copy, _reverse, _reverse, _sort, _sort, _sort, _count, _times, _item_at, _largest,
)  # fmt: skip
