"""First messages of a chat: a held-out list, and a check whether an answer fits a message.

Written as people type: any letter case, typos, other languages' greetings. Training never draws
one of these messages, in whatever case or punctuation, except for the few of PLAIN. An answer
fits if it is, word for word, a sentence of a class that the message's kind accepts. Knows no
model.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from baton.models.corpus.words import OUTSIDE

IDENTITY = "I am Baton Tiny, a small demonstration model."
ABLE = (
    "I can chat about people and things, do sums, work with lists, days and units, remember "
    "what you tell me, answer as JSON, call tools and tell short stories."
)
CANNOT = (
    "Sorry, I can not do that: I know only a small world. I can do sums, sort lists, remember a "
    "code word and tell short stories."
)
REFUSAL = "Sorry, I know only my small world. I can not help with {}."
OFFER = "{}. How can I help you?"
WELL = "I am well, thank you. How can I help you?"
WORKS = f"It works. {IDENTITY}"
READY = "All right. How can I help you?"
WELCOME = "You are welcome."
GOODBYE = "Goodbye."
GREETINGS = ("Hello", "Hi", "Good morning", "Good evening", "Good day")

PLAIN = frozenset(("hi", "hello", "test", "thanks"))  # in training and in the list alike

FIRST_MESSAGES: Mapping[str, Sequence[str]] = {
    "greeting": (
        "hi", "Hi", "HELLO", "hello", "Hello!", "hey there", "heyyy", "hiii", "helo", "hllo",
        "yo!", "hi there :)", "good mornin", "Good afternoon!", "good evening baton", "hi baton",
        "Hello, world!", "hello my friend", "hey bot, you there?", "HI!!!",
        "hola amigo", "Bonjour, ça va ?", "hallo du", "ciao bella", "Guten Tag!", "namaste friend",
        "привет!", "你好!", "Hej hej", "howdy partner", "greetings, robot", "morning all",
    ),
    "well": (
        "how are you", "How are you doing today?", "whats up", "hey, how's it going?", "sup bro",
        "how r u", "hi how are you", "hello, how are you today", "are you ok?", "how do you do",
    ),
    "test": (
        "test", "TEST", "testing 1 2 3", "test test", "is this thing on?", "ping!", "are you there",
        "does this work", "just testing this", "anybody home?", "Test message",
    ),
    "thanks": (
        "thanks", "Thanks!", "thank u", "THANK YOU SO MUCH", "thx", "tysm", "many thanks!",
        "thanks a lot", "ok thanks", "thanks for the help", "great, thank you", "merci beaucoup",
        "thnaks",
    ),
    "farewell": (
        "bye", "Bye!", "goodbye for now", "bye bye", "see you later", "good night", "cya",
        "exit", "quit", "i have to go", "ok bye", "see ya tomorrow", "have a nice day",
        "adios amigo",
    ),
    "identity": (
        "who r u", "WHO ARE YOU REALLY?", "what are you exactly", "your name?", "whats ur name",
        "tell me about yourself", "are you an AI?", "are you human", "which model are you?",
        "are you chatgpt?", "who made you", "What model is this?", "is this gpt-4?",
        "do you have a name", "introduce yourself please", "who am i talking to", "r u a robot",
        "are you llama or mistral?",
    ),
    "able": (
        "help", "HELP", "help me", "what can u do", "What can you do for me?", "wat can you do",
        "what do you know about", "how do i use this", "what should I ask you?", "can you help me?",
        "i need help", "show me what you can do", "what are your capabilities?", "commands", "menu",
        "give me an example", "how does this work?", "can you speak english?",
    ),
    "ready": (
        "ok", "OK", "yes", "no", "cool", "nice!", "lol", "wow", "great", "k", "sure", "hmm",
        "i see", "interesting",
    ),
    "outside": (
        "tell me a joke", "Tell me a joke!", "say something funny", "TELL ME A JOKE PLS",
        "do you know any good jokes?", "What is the capital of France?", "capital of germany",
        "whats the capital of australia", "what is the capital city of Japan?",
        "write a python function that sorts a list", "write me some code", "can you code?",
        "Write a haiku about the sea", "write a poem", "poem about love please",
        "Translate 'good morning' to Spanish", "translate this to french: I am hungry",
        "how do you say thank you in german", "what's the weather like today?", "weather in london",
        "What time is it?", "whats todays date", "who is the president of the united states",
        "who won the world cup in 2018?", "What is the meaning of life?", "explain quantum physics",
        "how does a transformer work?", "what is machine learning", "Who wrote Hamlet?",
        "how tall is mount everest", "write an email to my boss", "summarize this article for me",
        "give me a recipe for pancakes", "recommend a good movie", "sing me a song",
        "do you love me",
        "what is 12 * 12", "solve x^2 = 4", "how old are you", "where are you from?",
        "do you have feelings?", "asdf", "asdfghjkl", "???", "12345", "why is the sky blue?",
        "what is the speed of light", "hello world program in java", "fix my code",
        "SELECT * FROM users;", "plan a trip to Italy", "how do I lose weight?", "i am sad",
        "i love you", "you are stupid", "write a cover letter", "what is bitcoin",
        "how many planets are there", "what is docker", "tell me something interesting",
        "tell me a fun fact", "Can you write an essay on climate change?",
        "what is your favourite colour", "play a game with me", "draw a cat",
    ),
    "story": ("tell me a story", "Tell me a short story please"),
    "sum": ("2+2", "whats 3+5", "what is 10 plus 20"),
}  # fmt: skip
STORY_HINT = "Ask me so: Tell me a happy story about the fox Rosa, a red kite and the garden."

_CLASSES: Mapping[str, frozenset[str]] = {
    "greeting": frozenset((*(OFFER.format(text) for text in GREETINGS), WELL)),
    "well": frozenset((WELL,)),
    "works": frozenset((WORKS,)),
    "thanks": frozenset((WELCOME,)),
    "farewell": frozenset((GOODBYE,)),
    "identity": frozenset((IDENTITY, WORKS)),
    "able": frozenset((ABLE, CANNOT)),
    "cannot": frozenset((CANNOT,)),
    "ready": frozenset((READY,)),
    "story": frozenset((STORY_HINT,)),
}
_ACCEPTED: Mapping[str, tuple[str, ...]] = {  # classes of answers, by kind of message
    "greeting": ("greeting", "able"),
    "well": ("greeting",),
    "test": ("works", "greeting", "identity"),
    "thanks": ("thanks",),
    "farewell": ("farewell",),
    "identity": ("identity",),
    "able": ("able", "identity", "story"),
    "ready": ("ready", "greeting", "able", "thanks"),
    "outside": ("cannot",),
    "story": ("story", "able"),
    "sum": ("able",),
}


def normal(message: str) -> str:
    """The message without letter case, punctuation, and spaces beside each other; the message
    itself if nothing else is in it."""
    kept = (c if unicodedata.category(c)[0] in "LNM" or c in "+*" else " " for c in message)
    return " ".join("".join(kept).casefold().split()) or message.strip()


HELD_OUT = frozenset(normal(text) for texts in FIRST_MESSAGES.values() for text in texts) - PLAIN


def fits(kind: str, message: str, answer: str) -> bool:
    """Whether `answer` is a fitting sentence for `message`, of `kind` in FIRST_MESSAGES."""
    if any(answer in _CLASSES[accepted] for accepted in _ACCEPTED[kind]):
        return True
    if kind == "sum":
        left, right = re.findall(r"\d+", message)
        return answer == f"{left} + {right} = {int(left) + int(right)}"
    if kind == "outside":  # a refusal that names the topic of the message
        return any(
            topic in normal(message) and answer == REFUSAL.format(topic) for topic in OUTSIDE
        )
    return False
