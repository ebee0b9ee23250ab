"""The words of the small world that the trained model lives in, and the phrases about it.

Closed lists: whatever a conversation names comes from here, so that a small model can know
all of it. Knows no conversation and no tokens. Immutable.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Anna Ben Boris Carla Clara Dan David Ella Elena Emil Eva Felix Finn Greta Hana Hugo Ida "
    "Irene Ivan Jonas Julia Karin Lena Leo Lukas Maria Max Mia Nils Nora Olga Oscar Paul Petra "
    "Rosa Ruth Sam Sara Simon Tara Theo Tom Ursula Vera Viktor Willa Zoe"
)
CITIES = _words(
    "Athens Berlin Bern Cairo Dublin Geneva Hanoi Havana Helsinki Lima Lisbon London Madrid "
    "Milan Naples Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia Tokyo Turin Vienna Warsaw"
)
OBJECTS = _words(
    "banner ball basket bell book bottle box brush bucket button candle chair clock coin comb cup "
    "drum fan flute fork glove hammer hat jar kettle key kite knife ladder lamp lantern map mirror "
    "needle pen pillow plate ribbon ring rope scarf shell spoon stone stool ticket whistle wheel"
)
ANIMALS = _words(
    "badger bear beaver camel cat crow deer dog donkey duck falcon fox frog goat goose hare hen "
    "horse lamb lion mole mouse parrot pony rabbit raven seal sheep swan tiger toad turtle wolf"
)
COLOURS = _words("black blue brown golden green grey pink purple red silver violet white yellow")
PLACES = _words(
    "attic barn bridge castle cave cellar field forest garden harbour hill hut island kitchen lake "
    "library market meadow mill museum park river school station tower valley village well"
)
JOBS = _words(
    "baker carpenter cook dancer doctor driver farmer gardener painter pilot poet sailor singer "
    "tailor teacher writer"
)
FOODS = _words(
    "bread butter cake cheese cherries corn eggs fish grapes honey jam milk noodles olives pears "
    "plums potatoes rice salad soup tea toast"
)
THINGS = _words(
    "apples balls books boxes coins cups eggs hats keys kites pens plates shells stones"
)
WEATHER = _words("cloudy cold dry foggy hot rainy snowy sunny warm windy")
ROOMS = _words("attic bathroom bedroom cellar garage hall kitchen office")
CODE_FIRST = _words(
    "amber birch copper coral cotton crystal desert ember frozen gentle hidden hollow indigo ivory "
    "jade lunar marble misty noble ocean quiet royal rusty scarlet secret silent solar velvet "
    "wild winter"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
ORDINALS = _words("first second third fourth fifth")

OUTSIDE = (
    "football", "politics", "the stock market", "medicine", "chemistry", "physics", "computers",
    "films", "actors", "the law", "taxes", "space travel", "history", "philosophy", "religion",
    "poker", "programming", "engines", "biology", "the news", "elections", "banks", "fashion",
    "opera", "algebra", "viruses", "the economy", "video games", "cars", "aircraft",
)  # fmt: skip
OUTSIDE_QUESTIONS = (
    "Tell me about {}.",
    "What do you think about {}?",
    "Can you explain {}?",
    "What do you know about {}?",
    "Write an essay about {}.",
    "Give me advice about {}.",
    "I have a question about {}.",
    "{} asks about {}. What do you say?",
)
