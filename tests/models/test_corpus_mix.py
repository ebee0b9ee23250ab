"""The corpus: right answers, every task, two sides of the split that never meet."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from baton.models.corpus import mix
from baton.models.corpus.conversation import Conversation, Message, is_held_out
from baton.models.corpus.words import ANIMALS, COLOURS, DAYS, JOBS, MONTHS, NAMES, OBJECTS
from baton.models.training.tiny_tokenizer import CALL

SEEDS = range(150)


def words(messages: Sequence[Message]) -> int:
    return sum(len(json.dumps(message).split()) for message in messages)


def made(task: str, held_out: bool = False) -> list[Conversation]:
    return [mix.of_task(seed, task, held_out=held_out) for seed in SEEDS]


def pairs(talk: Conversation) -> list[tuple[str, str]]:
    """User's text and the assistant's after it."""
    said = talk.messages
    return [
        (one["content"], other["content"])
        for one, other in zip(said, said[1:], strict=False)
        if one["role"] == "user" and other["content"] is not None
    ]


def all_pairs(task: str) -> list[tuple[str, str]]:
    return [pair for talk in made(task) for pair in pairs(talk)]


# -- the split ---------------------------------------------------------------------------------


@pytest.mark.parametrize("task", mix.TASKS)
def test_every_content_lies_on_its_side(task: str) -> None:
    for held_out in (False, True):
        contents = {content for talk in made(task, held_out) for content in talk.contents}
        assert contents
        assert {is_held_out(content) for content in contents} == {held_out}


SHOWN = ("arithmetic", "days", "units", "lists", "json", "tools", "refusal", "unknown")


@pytest.mark.parametrize("task", SHOWN)
def test_no_question_of_the_one_side_is_asked_on_the_other(task: str) -> None:
    asked = [
        {
            re.sub(r"^(What|How)", "", message["content"])
            for seed in range(600)
            for message in mix.of_task(seed, task, held_out=held_out).messages
            if message["role"] == "user"
        }
        for held_out in (False, True)
    ]
    assert len(asked[1]) > 100
    assert asked[0] & asked[1] == set()


TELLING = ("chat", "recall", "story", "facts")


@pytest.mark.parametrize("task", TELLING)
def test_held_out_conversations_share_no_facts_with_training(task: str) -> None:
    reported = [
        {
            talk.messages[0]["content"] + talk.messages[2]["content"]
            if task == "chat"
            else talk.messages[0]["content"]
            for seed in range(600)
            for talk in [mix.of_task(seed, task, held_out=held_out)]
        }
        for held_out in (False, True)
    ]
    assert len(reported[1]) > 100
    assert reported[0] & reported[1] == set()


def test_about_one_content_in_eight_is_held_out() -> None:
    share = sum(is_held_out(f"+:({n}, 1)") for n in range(4000)) / 4000
    assert 0.1 < share < 0.15


# -- right answers -----------------------------------------------------------------------------


def test_sums_are_right() -> None:
    signs = Counter()
    for asked, answer in all_pairs("arithmetic"):
        left, sign, right, result = re.match(r"(\d+) ([+-]) (\d+) = (\d+)", answer).groups()
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert {left, right} == set(re.findall(r"\d+", asked))
        signs[sign] += 1
    assert min(signs.values()) > 50


def test_days_are_right() -> None:
    later = 0
    for asked, answer in all_pairs("days"):
        if found := re.match(r"Today is (\w+)\..* (\d) days?( ago)?\. Which day\?", asked):
            day, count, ago = found.groups()
            move = -int(count) if ago else int(count)
            assert answer == f"On {DAYS[(DAYS.index(day) + move) % 7]}."
            later += 1
            continue
        side, name = re.search(r"comes (after|before) (\w+)\?", asked).groups()
        names = DAYS if name in DAYS else MONTHS
        move = 1 if side == "after" else -1
        found_name = names[(names.index(name) + move) % len(names)]
        assert answer == f"{found_name} comes {side} {name}."
    assert later > 50


LARGER = {
    ("centimetres", "metres"): 100,
    ("metres", "kilometres"): 1000,
    ("grams", "kilograms"): 1000,
    ("millimetres", "centimetres"): 10,
    ("millilitres", "litres"): 1000,
    ("minutes", "hours"): 60,
    ("days", "weeks"): 7,
    ("hours", "days"): 24,
    ("months", "years"): 12,
    ("seconds", "minutes"): 60,
}


def test_units_are_right() -> None:
    seen = set()
    for _, answer in all_pairs("units"):
        count, large, result, small = re.fullmatch(
            r"(\d+) (\w+) are (\d+) (\w+)\.", answer
        ).groups()
        assert int(result) == int(count) * LARGER[small, large]
        seen.add((small, large))
    assert seen == set(LARGER)


def test_lists_are_right() -> None:
    kinds: Counter[str] = Counter()
    for asked, answer in all_pairs("lists"):
        order, _, listed = asked.partition(": ")
        items = listed.split(", ")
        numbers = items[0].isdigit()
        kinds[order.split()[0]] += 1
        said = answer.rstrip(".").split(" is ")[-1].split(", ")
        if "times" in order:
            item = re.search(r"is (\w+) in", order).group(1)
            assert answer == f"The word {item} is there {items.count(item)} times."
        elif order.startswith(("How many items", "Count")):
            assert answer == f"There are {len(items)} items."
        elif order.startswith(("Sort", "Put")):
            assert said == (sorted(items, key=int) if numbers else sorted(items))
        elif order.startswith("Reverse") or "backwards" in order:
            assert said == items[::-1]
        elif "largest" in order or "smallest" in order:
            choose = max if "largest" in order else min
            assert said == [choose(items, key=int)]
        elif "item of" in order:
            ordinal = re.search(r"the (\w+) item", order).group(1)
            at = -1 if ordinal == "last" else ("first", "second", "third", "fourth").index(ordinal)
            assert said == [items[at]]
        else:
            assert order in ("Copy this list", "Repeat this list", "Say after me")
            assert said == items
    assert len(kinds) >= 6


def test_json_has_the_given_keys_and_words() -> None:
    for asked, answer in all_pairs("json"):
        found = json.loads(answer)
        keys = re.search(r"JSON with ([a-z, ]+)", asked).group(1).split(", ")
        assert list(found) == keys
        assert all(str(value) in asked for value in found.values())


def test_calls_are_of_given_tools_with_words_of_the_user() -> None:
    called = set()
    for talk in made("tools"):
        given = {tool["function"]["name"]: tool["function"] for tool in talk.tools}
        request, calling, answer, reported = talk.messages
        (call,) = calling["tool_calls"]
        tool = given[call["function"]["name"]]
        arguments = call["function"]["arguments"]
        assert list(arguments) == tool["parameters"]["required"]
        assert all(value in request["content"] for value in arguments.values())
        (value,) = json.loads(answer["content"]).values()
        assert value == "yes" or value in reported["content"]
        called.add(tool["name"])
    assert len(called) == 5


def test_chat_questions_ask_for_stated_facts() -> None:
    for task in ("chat", "facts"):
        for talk in made(task):
            for at, message in enumerate(talk.messages):
                question = message["role"] == "user" and message["content"].endswith("?")
                if not question:
                    continue
                before = " ".join(m["content"] for m in talk.messages[: at + 1])
                last = talk.messages[at + 1]["content"].rstrip(".").split()[-1]
                assert last in before
    for asked, answer in all_pairs("unknown"):
        (name,) = [name for name in NAMES if re.search(rf"\b{name}\b", asked)]
        assert answer == f"You have not told me about {name}."


def test_the_code_word_is_said_as_it_was_given() -> None:
    for talk in made("recall"):
        code = re.search(r"\w+-\w+-\d\d", talk.messages[0]["content"]).group(0)
        assert talk.messages[-1]["content"] == f"The code word is {code}."


# -- whole conversations -----------------------------------------------------------------------


def test_a_seed_gives_the_same_conversation_again() -> None:
    for how in ({"held_out": False}, {"held_out": True}):
        one, same = (mix.conversation(3, tokens=200, measure=words, **how) for _ in "ab")
        other = mix.conversation(4, tokens=200, measure=words, **how)
        assert one == same
        assert one.messages != other.messages
    assert len({str(mix.of_task(seed, "lists", held_out=False)) for seed in SEEDS}) > 140


def test_a_conversation_has_the_asked_length_and_mixes_tasks() -> None:
    lengths, tasks = [], Counter()
    for seed in range(60):
        talk = mix.conversation(seed, held_out=False, tokens=400, measure=words)
        lengths.append(words(talk.messages))
        tasks.update(set(talk.tasks))
        assert len(talk.tasks) == len(talk.messages)
        assert talk.messages[-1]["role"] == "assistant"
    assert max(lengths) <= 400
    assert sum(lengths) / len(lengths) > 300
    assert set(tasks) == {*mix.TASKS, "system"}


def test_a_conversation_may_use_some_tasks_until_exhausted() -> None:
    for seed in range(40):
        talk = mix.conversation(
            seed, held_out=False, tokens=700, measure=words, tasks=("chat", "facts")
        )
        assert set(talk.tasks) - {"system"} == {"chat", "facts"}


def test_no_word_after_an_article_begins_with_a_vowel() -> None:
    for word in (*COLOURS, *OBJECTS, *ANIMALS, *JOBS):
        assert word[0] not in "aeiou", word


def test_some_conversations_begin_with_a_system_message() -> None:
    begun = 0
    for seed in range(200):
        talk = mix.conversation(seed, held_out=False, tokens=5, measure=words)
        roles = [message["role"] for message in talk.messages]
        begun += roles[0] == "system"
        assert "system" not in roles[1:]
        assert roles[-1] == "assistant"
    assert 15 < begun < 50


def test_names_are_used_once_and_answers_never_doubtful() -> None:
    for seed in range(40):
        talk = mix.conversation(seed, held_out=False, tokens=900, measure=words)
        homes = [
            message["content"]
            for message, task in zip(talk.messages, talk.tasks, strict=True)
            if task == "chat" and re.fullmatch(r"\w+ lives in \w+\.", message["content"] or "")
            and message["role"] == "user"
        ]  # fmt: skip
        named = [text.split()[0] for text in homes]
        assert len(named) == len(set(named))
        codes = [m for m in talk.messages if re.search(r"code word( is|:) ", m["content"] or "")]
        assert sum(m["role"] == "user" for m in codes) <= 1


@pytest.mark.parametrize("distance", [50, 400])
def test_recall_has_the_distance_asked_for(distance: int) -> None:
    for seed in range(10):
        talk = mix.recall(seed, held_out=True, distance=distance, measure=words)
        assert talk.tasks[:2] == talk.tasks[-2:] == ("recall", "recall")
        assert distance <= words(talk.messages[2:-2]) < distance + 250
        code = re.search(r"\w+-\w+-\d\d", talk.messages[0]["content"]).group(0)
        between = json.dumps(talk.messages[2:-2])
        assert code not in between and not re.search("([Tt]h[ei]s?|My) code word", between)
        assert code in talk.messages[-1]["content"]


def test_tools_are_given_where_they_are_called() -> None:
    with_tools = 0
    for seed in range(150):
        talk = mix.conversation(seed, held_out=False, tokens=150, measure=words)
        with_tools += bool(talk.tools)
        assert talk.tools or "tools" not in talk.tasks
        assert CALL not in json.dumps(talk.messages)  # the template writes it
    assert 15 < with_tools < 50
