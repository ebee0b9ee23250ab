"""Episodes whose answers have a form: JSON of a given shape, and calls of given tools.

A shape is described by its keys; a call takes its arguments from the user's words. A tool's answer
comes back as JSON and is said in a sentence. What is asked for is the content that the split
divides.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from baton.models.corpus.conversation import (
    Episode,
    Message,
    Scene,
    assistant,
    call,
    exchange,
    user,
)
from baton.models.corpus.words import (
    CITIES,
    COLOURS,
    DAYS,
    JOBS,
    NAMES,
    OBJECTS,
    PLACES,
    ROOMS,
    WEATHER,
)

Arguments = dict[str, object]


def records(scene: Scene) -> Episode:
    """One or two sentences, each returned as JSON of the keys that are asked for."""
    texts: list[str] = []
    for _ in range(scene.choose.randint(1, 2)):
        texts += _record(scene)
    return exchange("json", *texts)


_SENTENCES = (
    "The {job} {name} from {city} is {age} years old.",
    "In the box of {name} there is a {colour} {object}.",
    "My friend {name} lives in {city} and has {count} pens.",
)


def _record(scene: Scene) -> tuple[str, str]:
    choose = scene.choose

    def draw() -> tuple[int, tuple[tuple[str, object], ...]]:
        kind = choose.randrange(len(_SENTENCES))
        return kind, tuple(
            (key, value)
            for key, value in _values(scene).items()
            if f"{{{key}}}" in _SENTENCES[kind]
        )

    kind, drawn = scene.fresh("json", draw)
    values = dict(drawn)
    sentence = _SENTENCES[kind].format(**values)
    keys = choose.sample(sorted(values), choose.randint(1, len(values)))
    shape = ", ".join(keys)
    asked = choose.choice(
        (f"Answer as JSON with {shape}: {sentence}", f"{sentence} Give me JSON with {shape}.")
    )
    return asked, json.dumps({key: values[key] for key in keys})


def _values(scene: Scene) -> dict[str, object]:
    """Draw a value for each key."""
    choose = scene.choose
    return {
        "name": choose.choice(NAMES),
        "city": choose.choice(CITIES),
        "job": choose.choice(JOBS),
        "colour": choose.choice(COLOURS),
        "object": choose.choice(OBJECTS),
        "age": choose.randint(1, 99),
        "count": choose.randint(2, 99),
    }


@dataclass(frozen=True, slots=True)
class _Tool:
    """`request` draws the user's words and the arguments, `answer` the tool's values, `sentence` is
    the sentence about them."""

    name: str
    description: str
    arguments: tuple[str, ...]
    request: Callable[[Scene], tuple[str, Arguments]]
    answer: Callable[[Scene], Arguments]
    sentence: Callable[[Arguments, Arguments], str]

    def schema(self) -> Message:
        kinds = {name: {"type": "string"} for name in self.arguments}
        parameters = {"type": "object", "properties": kinds, "required": list(self.arguments)}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


def _weather(scene: Scene) -> tuple[str, Arguments]:
    city, day = scene.choose.choice(CITIES), scene.choose.choice(DAYS)
    return f"How is the weather in {city} on {day}?", {"city": city, "day": day}


def _find(scene: Scene) -> tuple[str, Arguments]:
    thing, colour = scene.choose.choice(OBJECTS), scene.choose.choice(COLOURS)
    return f"Please find the {colour} {thing}.", {"object": thing, "colour": colour}


def _send(scene: Scene) -> tuple[str, Arguments]:
    name, thing = scene.choose.choice(NAMES), scene.choose.choice(OBJECTS)
    return f"Please send the {thing} to {name}.", {"object": thing, "name": name}


def _light(scene: Scene) -> tuple[str, Arguments]:
    room, state = scene.choose.choice(ROOMS), scene.choose.choice(("on", "off"))
    colour = scene.choose.choice(COLOURS)
    asked = f"Switch the {colour} light in the {room} {state}."
    return asked, {"room": room, "colour": colour, "state": state}


def _visit(scene: Scene) -> tuple[str, Arguments]:
    name, city = scene.choose.choice(NAMES), scene.choose.choice(CITIES)
    return f"Book a trip to {city} for {name}.", {"city": city, "name": name}


TOOLS = (
    _Tool(
        "get_weather", "the weather of a city on a day", ("city", "day"), _weather,
        lambda scene: {"weather": scene.choose.choice(WEATHER)},
        lambda asked, got: f"It is {got['weather']} in {asked['city']} on {asked['day']}.",
    ),
    _Tool(
        "find_object", "where an object is", ("object", "colour"), _find,
        lambda scene: {"place": scene.choose.choice(PLACES)},
        lambda asked, got: f"The {asked['colour']} {asked['object']} is in the {got['place']}.",
    ),
    _Tool(
        "send_object", "sends an object to somebody", ("object", "name"), _send,
        lambda scene: {"day": scene.choose.choice(DAYS)},
        lambda asked, got: f"The {asked['object']} reaches {asked['name']} on {got['day']}.",
    ),
    _Tool(
        "set_light", "switches a light", ("room", "colour", "state"), _light,
        lambda scene: {"done": "yes"},
        lambda asked, got: f"The {asked['colour']} light in the {asked['room']} is "
        f"{asked['state']}.",
    ),
    _Tool(
        "book_trip", "books a trip for somebody", ("city", "name"), _visit,
        lambda scene: {"day": scene.choose.choice(DAYS)},
        lambda asked, got: f"{asked['name']} goes to {asked['city']} on {got['day']}.",
    ),
)  # fmt: skip


def give_tools(scene: Scene) -> None:
    """Some of the tools, in any order, for all of a conversation."""
    count = scene.choose.randint(1, 4)
    scene.tools = tuple(tool.schema() for tool in scene.choose.sample(TOOLS, count))


def calls(scene: Scene) -> Episode:
    """A request that one of the scene's tools serves, its call, its answer and the telling."""
    given = {tool["function"]["name"] for tool in scene.tools}
    tool = scene.choose.choice([tool for tool in TOOLS if tool.name in given])
    asked: list[tuple[str, Arguments]] = []

    def draw() -> tuple[str]:
        asked.append(tool.request(scene))
        return (asked[-1][0],)

    scene.fresh("call", draw)
    text, arguments = asked[-1]
    got = tool.answer(scene)
    messages = (
        user(text),
        call(tool.name, arguments),
        {"role": "tool", "content": json.dumps(got)},
        assistant(tool.sentence(arguments, got)),
    )
    return Episode("tools", (messages,))
