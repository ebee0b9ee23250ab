"""Episodes of what people type first: greetings, thanks, questions about the model, and requests
from the real world, which it declines by saying what it can do.

A phrase is typed as people type: in any letter case, with or without its punctuation, with
typos. What is typed is the content that the split divides; what `first_messages` holds out is
never drawn, except for its few plain words. Requests are made of open lists, so that whatever is
unknown is declined.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from baton.models.corpus.conversation import Episode, Scene, exchange
from baton.models.corpus.first_messages import (
    ABLE,
    CANNOT,
    GOODBYE,
    HELD_OUT,
    IDENTITY,
    OFFER,
    PLAIN,
    READY,
    STORY_HINT,
    WELCOME,
    WELL,
    WORKS,
    normal,
)
from baton.models.corpus.numbers import operands, result
from baton.models.corpus.phrases import (
    ASKED_IDENTITY,
    FAREWELL,
    HELLO,
    HOW_ARE_YOU,
    LANGUAGES,
    OUTSIDE_REQUESTS,
    PLACES,
    PROGRAMMING,
    REMARKS,
    SOMEONE,
    STORIES,
    SUBJECTS,
    TEST,
    THANKS,
    WHAT_CAN_YOU_DO,
)
from baton.models.corpus.sentences import NOUNS, QUALITIES, VERBS
from baton.models.corpus.words import NAMES

Draw = Callable[[random.Random], str]
_PLAIN_ANSWERS = {
    "hi": OFFER.format("Hi"),
    "hello": OFFER.format("Hello"),
    "test": WORKS,
    "thanks": WELCOME,
}
_PLAIN_SHARE = 0.12  # of the messages of the training side
_SUM_SHARE = 0.12
_TYPO_SHARE = 0.15
_KINDS: dict[str, tuple[tuple[str, ...], str, float]] = {  # phrases, answer, weight
    "hello": (HELLO, OFFER.format("Hello"), 1.2),
    "well": (HOW_ARE_YOU, WELL, 0.7),
    "test": (TEST, WORKS, 0.6),
    "thanks": (THANKS, WELCOME, 0.7),
    "bye": (FAREWELL, GOODBYE, 0.7),
    "who": (ASKED_IDENTITY, IDENTITY, 1.2),
    "able": (WHAT_CAN_YOU_DO, ABLE, 1.2),
    "ready": (REMARKS, READY, 0.9),
    "story": (STORIES, STORY_HINT, 0.3),
    "outside": (OUTSIDE_REQUESTS, CANNOT, 5.0),
}
_ECHOED = {"hi": "Hi", "good morning": "Good morning", "good evening": "Good evening",
           "good day": "Good day", "hello": "Hello"}  # fmt: skip
_ENDINGS = ("", "", "", "", "!", "!!", "?", ".", "...", " :)", " please", "??", "!!!", " pls", " ")
_SHORTENED = {"you": "u", "are": "r", "your": "ur", "please": "plz", "what": "wat", "is": "s",
              "for": "4", "the": "teh", "about": "abt", "because": "cuz"}  # fmt: skip
_ADDED = ("really", "exactly", "now", "today", "then", "actually", "bro", "please", "here", "baton")
_QUESTIONS = ("what", "who", "how", "why", "where", "when", "can", "do", "are", "is", "which")


def first(scene: Scene) -> Episode:
    """One message as people type it, and the fitting answer."""
    choose = scene.choose
    share = choose.random()
    if share < _PLAIN_SHARE and not scene.held_out:
        return exchange("first", *_plain(choose))
    if share < _PLAIN_SHARE + _SUM_SHARE:
        return exchange("first", *_sum(scene))
    asked, answer = scene.fresh("first", lambda: _drawn(choose))
    return exchange("first", asked, answer)


def _plain(choose: random.Random) -> tuple[str, str]:
    word = choose.choice(sorted(_PLAIN_ANSWERS))
    ending = choose.choice(("", "", "", "!", ".", "?", "!!"))
    return _cased(choose, word) + ending, _PLAIN_ANSWERS[word]


def _sum(scene: Scene) -> tuple[str, str]:
    choose = scene.choose
    while True:
        sign = choose.choice("+-")
        left, right = operands(scene, sign)
        word = choose.choice(("plus", "and") if sign == "+" else ("minus", "less"))
        asked = choose.choice(
            (
                f"{left}{sign}{right}",
                f"{left} {sign} {right}",
                f"{left}{sign}{right}=?",
                f"what is {left}{sign}{right}",
                f"whats {left} {sign} {right}?",
                f"what's {left} {word} {right}",
                f"how much is {left}{sign}{right}?",
                f"calculate {left} {sign} {right}",
                f"can you add {left} and {right}?" if sign == "+" else f"{left} minus {right}?",
            )
        )
        asked = _cased(choose, asked)
        if normal(asked) not in HELD_OUT:
            return asked, f"{left} {sign} {right} = {result(left, sign, right)}"


def _drawn(choose: random.Random) -> tuple[str, str]:
    """A message that is not held out, and its answer."""
    while True:
        asked, answer = _hello(choose) if choose.random() < 0.12 else _request(choose)
        if normal(asked) not in HELD_OUT:
            return asked, answer


def _hello(choose: random.Random) -> tuple[str, str]:
    """Return a greeting with a name, or with its last letter repeated."""
    said, answered = choose.choice(tuple(_ECHOED.items()))
    if said in PLAIN and choose.random() < 0.4:
        text = said + said[-1] * choose.randint(1, 4)
    else:
        name = choose.choice((*SOMEONE, choose.choice(NAMES).lower(), _word(choose)))
        text = said
        if said in PLAIN or choose.random() < 0.7:
            text += f"{choose.choice((' ', ' ', ', '))}{name}"
        if choose.random() < 0.2:
            text = (
                f"{said} my name is {choose.choice((choose.choice(NAMES).lower(), _word(choose)))}"
            )
    return _typed(choose, text), OFFER.format(answered)


def _request(choose: random.Random) -> tuple[str, str]:
    weights = [weight for _, _, weight in _KINDS.values()]
    kind = choose.choices(tuple(_KINDS), weights)[0]
    phrases, answer, _ = _KINDS[kind]
    text = _filled(choose, choose.choice(phrases))
    if kind == "outside" and choose.random() < 0.15:
        joint = choose.choice((" and ", ", ", ". ", " because ", ": "))
        text += f"{joint}{_filled(choose, choose.choice(phrases))}"
    if kind in ("hello", "thanks", "bye") and choose.random() < 0.3:
        text += f"{choose.choice((' ', ', '))}{choose.choice(SOMEONE)}"
    if kind not in ("hello", "thanks", "bye", "ready") and choose.random() < 0.08:
        text = f"{choose.choice(('hi', 'hey', 'hello', 'ok', 'please', 'so', 'bot'))} {text}"
    if kind in ("well", "who", "able") and choose.random() < 0.1:
        text += f" {choose.choice(_ADDED)}"
    return _typed(choose, text), answer


def _filled(choose: random.Random, phrase: str) -> str:
    """The phrase with a word of its list for each name in braces."""
    parts = []
    for literal, field, _, _ in string.Formatter().parse(phrase):
        parts.append(literal)
        if field is not None:
            parts.append(_FILLINGS[field](choose))
    return "".join(parts)


def _word(choose: random.Random) -> str:
    """Letters that make no word: what people type at random, and names never seen."""
    letters = choose.choice((string.ascii_lowercase, "asdfghjkl", "aeioubcdlmnrst", "qwertyuiop"))
    return "".join(choose.choice(letters) for _ in range(choose.randint(3, 10)))


def _of(words: tuple[str, ...]) -> Draw:
    return lambda choose: choose.choice(words)


_MEANT_OTHERWISE = (  # alone, or after "can you": no request from the real world
    "able", "clear", "cool", "fine", "good", "grand", "great", "help", "kind", "ready", "start",
    "stop", "test", "thank",
)  # fmt: skip
_FILLINGS: dict[str, Draw] = {
    "noun": _of(NOUNS),
    "quality": _of(tuple(word for word in QUALITIES if word not in _MEANT_OTHERWISE)),
    "verb": _of(tuple(word for word in VERBS if word not in _MEANT_OTHERWISE)),
    "place": _of(PLACES),
    "language": _of(LANGUAGES),
    "code": _of(PROGRAMMING),
    "subject": _of(SUBJECTS),
    "word": _word,
    "digits": lambda choose: str(choose.randrange(10 ** choose.randint(1, 8))),
    "signs": lambda choose: choose.choice("?!.-+=:)") * choose.randint(1, 5),
    "a": lambda choose: str(choose.randint(2, 20)),
    "b": lambda choose: str(choose.randint(2, 99)),
}


def _typed(choose: random.Random, text: str) -> str:
    """Return the phrase as a person types it."""
    words = [
        _SHORTENED.get(word, word) if choose.random() < 0.06 else word for word in text.split(" ")
    ]
    text = " ".join(words)
    if len(text) > 4 and choose.random() < _TYPO_SHARE:
        text = _mistyped(choose, text)
    ending = choose.choice(_ENDINGS)
    if words[0] in _QUESTIONS and choose.random() < 0.5:
        ending = "?"
    return _cased(choose, text) + ending


def _mistyped(choose: random.Random, text: str) -> str:
    """One letter dropped, doubled, changed or swapped with the next."""
    at = choose.randrange(1, len(text) - 1)
    before, letter, after = text[:at], text[at], text[at + 1 :]
    return choose.choice(
        (
            before + after,
            before + letter + letter + after,
            before + choose.choice(string.ascii_lowercase) + after,
            before + after[0] + letter + after[1:],
        )
    )


def _cased(choose: random.Random, text: str) -> str:
    how = choose.random()
    if how < 0.45:
        return text
    if how < 0.82:
        return text[:1].upper() + text[1:]
    if how < 0.92:
        return text.upper()
    return text.title()
