"""Episodes of memory: places and possessions of people, facts asked about later, a code word.

Stated in one part and asked about in another, so that other episodes may lie between; names are
used once in a conversation, so that an answer is never in doubt. The content of one statement
(name, city, object and so on) is the content that the split divides.
"""

from __future__ import annotations

from baton.models.corpus.conversation import Episode, Message, Scene, assistant, turns, user
from baton.models.corpus.words import (
    ANIMALS,
    CITIES,
    CODE_FIRST,
    COLOURS,
    FOODS,
    JOBS,
    OBJECTS,
    PLACES,
)

_GIVEN = (
    "The code word is {}. Remember it.",
    "Remember this code word: {}.",
    "My code word is {}. I will ask you later.",
)
_ASKED = ("What is the code word?", "Tell me the code word.", "Do you remember the code word?")
_LEAST_NAMES = 4


def chat(scene: Scene) -> Episode:
    """People, places and objects, introduced over some turns and recalled over others."""
    choose = scene.choose
    people = [_person(scene) for _ in range(choose.randint(1, 3))]
    statements: list[str] = []
    for name, city, colour, thing, place in people:
        statements += [f"{name} lives in {city}.", f"I see. {name} lives in {city}."]
        has = f"{name} has a {colour} {thing} in the {place}."
        statements += [has, f"I see. {has}"]
    asked: list[str] = []
    for person in choose.sample(people, choose.randint(1, len(people))):
        for question in choose.sample(range(5), choose.randint(1, 3)):
            asked += _about(scene, person, question)
    if choose.random() < 0.3:
        asked += _moved(scene, people[0])
    return Episode("chat", (turns(statements), turns(asked)))


Person = tuple[str, str, str, str, str]


def _person(scene: Scene) -> Person:
    choose, names = scene.choose, scene.free_names()
    person = scene.fresh(
        "person",
        lambda: (
            choose.choice(names),
            choose.choice(CITIES),
            choose.choice(COLOURS),
            choose.choice(OBJECTS),
            choose.choice(PLACES),
        ),
    )
    scene.take(person[0])
    return person


def _about(scene: Scene, person: Person, question: int) -> tuple[str, str]:
    name, city, colour, thing, place = person
    return (
        (f"Where does {name} live?", f"{name} lives in {city}."),
        (f"What does {name} have?", f"{name} has a {colour} {thing}."),
        (f"What colour is the {thing} of {name}?", f"The {thing} of {name} is {colour}."),
        (f"Where is the {thing} of {name}?", f"The {thing} of {name} is in the {place}."),
        (f"Where did {name} put it?", f"{name} put the {thing} in the {place}."),
    )[question]


def _moved(scene: Scene, person: Person) -> tuple[str, ...]:
    name, _, _, thing, place = person
    other = scene.choose.choice([found for found in PLACES if found != place])
    move = f"{name} takes the {thing} to the {other}."
    asked = f"Where is the {thing} of {name} now?"
    return move, f"I see. {move}", asked, f"The {thing} of {name} is now in the {other}."


def facts(scene: Scene) -> Episode:
    """A few facts in one message, one to three of them asked later."""
    choose = scene.choose
    names = scene.free_names()
    count = choose.randint(2, 4)
    people = choose.sample(names, count)
    scene.take(*people)
    statements, asked = [], []
    for name in people:
        fact, question, answer = _fact(scene, name)
        statements.append(fact)
        asked.append((question, answer))
    order = choose.sample(asked, choose.randint(1, min(3, count)))
    start = choose.choice(("Here are some facts. ", "Remember this: ", "Listen. "))
    first = start + " ".join(statements)
    if choose.random() < 0.4:
        question, answer = order[0]
        one = turns((f"{first} {question}", answer))
        return Episode("facts", (one, *(turns(pair) for pair in order[1:])))
    later = [text for pair in order for text in pair]
    return Episode("facts", (turns((first, f"I will remember {count} facts.")), turns(later)))


def _fact(scene: Scene, name: str) -> tuple[str, str, str]:
    choose = scene.choose

    def draw() -> tuple[int, str]:
        kind = choose.randrange(4)
        return kind, (
            choose.choice(JOBS), choose.choice(FOODS), str(choose.randint(2, 99)),
            choose.choice(ANIMALS),
        )[kind]  # fmt: skip

    kind, what = scene.fresh(f"fact {name}", draw)
    return (
        (f"{name} is a {what}.", f"What is the job of {name}?", f"{name} is a {what}."),
        (f"{name} likes {what}.", f"What does {name} like?", f"{name} likes {what}."),
        (f"{name} is {what} years old.", f"How old is {name}?", f"{name} is {what} years old."),
        (
            f"{name} has a pet {what}.",
            f"What is the pet of {name}?",
            f"The pet of {name} is a {what}.",
        ),
    )[kind]


def unknown(scene: Scene) -> Episode:
    """A question about a person not mentioned before; the answer says that it is unknown."""
    choose = scene.choose
    name = choose.choice(scene.free_names())
    scene.take(name)
    form, thing = scene.fresh(
        f"unknown {name}", lambda: (choose.randrange(3), choose.choice(OBJECTS))
    )
    asked = (
        f"Where is the {thing} of {name}?",
        f"What colour is the {thing} of {name}?",
        f"Does {name} have a {thing}?",
    )[form]
    return Episode("unknown", (turns((asked, f"You have not told me about {name}.")),))


def code_word(scene: Scene) -> Episode:
    """A code word given in the first part and asked for in the second."""
    choose = scene.choose
    word = code(scene)
    given = choose.choice(_GIVEN).format(word)
    return Episode("recall", (turns((given, "I will remember it.")), code_question(scene, word)))


def code(scene: Scene) -> str:
    """Two words and a number; taken once in a conversation."""
    choose = scene.choose
    first, second, number = scene.fresh(
        "code",
        lambda: (choose.choice(CODE_FIRST), choose.choice(ANIMALS), choose.randint(10, 99)),
    )
    scene.take("code word")
    return f"{first}-{second}-{number}"


def code_question(scene: Scene, word: str) -> tuple[Message, ...]:
    return user(scene.choose.choice(_ASKED)), assistant(f"The code word is {word}.")


def room_for_names(scene: Scene) -> bool:
    """Whether enough names are left for any episode of memory."""
    return len(scene.free_names()) >= _LEAST_NAMES
