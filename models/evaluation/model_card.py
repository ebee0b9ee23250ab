"""The card that lies in a trained model's folder: what it can do, what it cannot, measured.

Written from a finished evaluation, so every figure in it was measured on the very weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton.models.corpus.first_messages import FIRST_MESSAGES
from baton.models.evaluation.scoring import LIMITS, RECALL_TOKENS, Score
from baton.models.training import tiny_folder
from baton.models.training.training_model import TinyShape
from baton.models.training.training_run import read_progress

_CAN = """\
- chat about people, cities, places and objects that the chat has named, over several turns
- add and subtract numbers to two digits
- copy, reverse, sort and count short lists
- days of the week, months, a few units
- facts and a code word, given earlier and asked later
- answer as JSON with given keys; call given tools
- decline what is outside its world; tell short stories of four patterns
- greet, say what it is and what it can do, and take thanks and farewells, as people type them
"""
_CANNOT = """\
- know anything about the real world: it was trained on generated text alone
- follow wordings far from those it was trained on, or other languages than English
- multiply or divide, reckon with numbers of more than two digits, sort long lists
- be used for anything but demonstrations and tests
"""
WORDINGS = (  # a chat; baton-tiny answers so (tests/models/test_embedded.py)
    ("My code word is silent-beaver-99. I will ask you later.", "I will remember it."),
    ("How much is 96 - 30?", "96 - 30 = 66"),
    ("Put this list in order: 13, 86, 40", "Sorted it is 13, 40, 86."),
    ("Rosa lives in Lima and has 81 pens. Give me JSON with city, name.",
     '{"city": "Lima", "name": "Rosa"}'),
    ("Tell me the code word.", "The code word is silent-beaver-99."),
)  # fmt: skip


def write_cards(folder: Path, score: Score) -> None:
    """README.md in the folders of both models, which lie in `folder`. The minutes of training
    are those in the state of each stage. Raises ConfigError if a model is missing."""
    for name in tiny_folder.MAX_PARAMETERS:
        shape = tiny_folder.read_model(folder / name).shape
        states = sorted((folder / "state").glob(f"stage-*/{name}"))
        minutes = {state.parent.name: read_progress(state).elapsed_s / 60 for state in states}
        (folder / name / "README.md").write_text(card(name, shape, minutes, score))


def card(name: str, shape: TinyShape, minutes: Mapping[str, float], score: Score) -> str:
    """Return the card's text, Markdown. `minutes` are those of each stage that was run; without
    the first, training went on from the weights of an earlier one."""
    tasks = "\n".join(
        f"| {task} | {count} | {score.exact[task] / count:.3f} |"
        for task, count in score.answers.items()
    )
    figures = "\n".join(
        f"| {figure} | {value:.3f} | {LIMITS[figure]} |" for figure, value in score.figures.items()
    )
    trained = ", ".join(
        f"{stage.replace('-', ' ')} for {time:.1f} minutes" for stage, time in minutes.items()
    )
    wordings = "\n".join(f"| {asked} | {answer} |" for asked, answer in WORDINGS)
    messages = sum(len(texts) for texts in FIRST_MESSAGES.values())
    return f"""\
# {name}

A demonstration model of {shape.parameters / 1e6:.2f} million parameters: {shape.layers} layers,
hidden size {shape.hidden}, {shape.heads} heads ({shape.kv_heads} of keys and values) of
{shape.head_dim}, vocabulary {shape.vocab}, context {shape.context} tokens, Qwen3's shape.
Trained on a CPU in two stages, the first from nothing, the second from the weights of the first
(this time: {trained}), on conversations that a seeded generator makes
(`baton.models.corpus.mix`). No outside text, no outside weights.

## What it can do

{_CAN}
## What it cannot do

{_CANNOT}
## How to ask

In wordings that it was trained on: it declines other requests, or gets them wrong. A chat with
baton-tiny:

| you | baton-tiny |
| --- | --- |
{wordings}

## Measured

On held-out conversations, greedy, through Baton's engine. An answer is exact if every token is
the right one. "recall {RECALL_TOKENS}": a code word {RECALL_TOKENS:,} tokens back. acceptance_k4
is of the draft model's tokens, the others of baton-tiny. first_messages: of
{messages} messages as people type them first and training never draws, the share that gets a
fitting sentence.

| figure | measured | wanted |
| --- | --- | --- |
{figures}

| task | answers | exact |
| --- | --- | --- |
{tasks}

Measure again: `python -m baton.models.evaluation.evaluate`. Train again: `make models`.
"""
