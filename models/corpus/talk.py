"""Episodes of plain talk: greetings, what the model is, refusals outside its world, stories.

A story follows from what is asked for (person, which object, where, and the mood), so that it has
one right wording. What a story is about and the asker are the content that the split divides.
"""

from __future__ import annotations

from baton.models.corpus.conversation import Episode, Scene, exchange
from baton.models.corpus.first_messages import ABLE, GREETINGS, IDENTITY, OFFER, REFUSAL, WELCOME
from baton.models.corpus.words import (
    ANIMALS,
    COLOURS,
    NAMES,
    OBJECTS,
    OUTSIDE,
    OUTSIDE_QUESTIONS,
    PLACES,
)

_IDENTITY_QUESTIONS = ("Who are you?", "What are you?", "What is your name?")
_ABLE = ("What can you do?", "How can you help me?", "What do you know?")

_STORIES = {
    "happy": (
        "Once there was a {animal} called {name}. One day {name} found a {colour} {thing} in the "
        "{place}. The {thing} was just right. {name} took it home and was very happy."
    ),
    "sad": (
        "Long ago a {animal} called {name} had a {colour} {thing}. One night {name} lost it in "
        "the {place}. {name} looked for the {thing} all day. It was gone, and {name} cried."
    ),
    "funny": (
        "A {animal} called {name} wore a {colour} {thing} as a hat. Everybody in the {place} "
        "laughed. Then {name} laughed too, and the {thing} fell down."
    ),
    "brave": (
        "It was dark in the {place}. A {animal} called {name} heard a cry for help. {name} took "
        "the {colour} {thing} and ran. Soon all were safe, and they thanked {name}."
    ),
}


def talk(scene: Scene) -> Episode:
    """A greeting with a name, and perhaps a question about the model itself."""
    choose = scene.choose
    name, hello = scene.fresh("greeting", lambda: (choose.choice(NAMES), choose.choice(GREETINGS)))
    texts = [f"{hello}, I am {name}.", f"{hello}, {name}. How can I help you?"]
    if not scene.held_out and choose.random() < 0.5:
        texts = [choose.choice((f"{hello}!", hello)), OFFER.format(hello)]
    if choose.random() < 0.4:
        texts += [choose.choice(_IDENTITY_QUESTIONS), IDENTITY]
    if choose.random() < 0.3:
        texts += [choose.choice(_ABLE), ABLE]
    if choose.random() < 0.3:
        texts += ["Thank you.", WELCOME]
    return exchange("talk", *texts)


def refusal(scene: Scene) -> Episode:
    """A question from outside the model's world."""
    choose = scene.choose
    name, topic = scene.fresh("refusal", lambda: (choose.choice(NAMES), choose.choice(OUTSIDE)))
    # Held out, the one wording that shows the name, and so differs from all training.
    question = OUTSIDE_QUESTIONS[-1] if scene.held_out else choose.choice(OUTSIDE_QUESTIONS)
    named = question.startswith("{}")
    asked = question.format(name, topic) if named else question.format(topic)
    return exchange("refusal", asked, REFUSAL.format(topic))


def story(scene: Scene) -> Episode:
    """A short story about what is asked for, and perhaps a question about it."""
    choose = scene.choose
    name, animal, colour, thing, place, mood = scene.fresh(
        "story",
        lambda: (
            choose.choice(NAMES),
            choose.choice(ANIMALS),
            choose.choice(COLOURS),
            choose.choice(OBJECTS),
            choose.choice(PLACES),
            choose.choice(sorted(_STORIES)),
        ),
    )
    asked = f"Tell me a {mood} story about the {animal} {name}, a {colour} {thing} and the {place}."
    story = _STORIES[mood].format(name=name, animal=animal, colour=colour, thing=thing, place=place)
    return exchange("story", asked, story, *_after(scene, name, animal, colour, thing))


def _after(scene: Scene, name: str, animal: str, colour: str, thing: str) -> tuple[str, ...]:
    questions = (
        ("Who was in the story?", f"It was about the {animal} {name}."),
        ("Which object was in the story?", f"There was a {colour} {thing} in it."),
    )
    return scene.choose.choice(questions) if scene.choose.random() < 0.5 else ()
