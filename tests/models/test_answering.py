"""Greedy answers through the engine are those of the model that was trained, many or one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from baton.models.embedded import embedded_model
from baton.models.evaluation import answering
from baton.models.evaluation.answering import ModelAnswers
from baton.models.training import tiny_folder, tiny_tokenizer
from baton.models.training.training_model import TinyShape, TrainingModel

TOKENIZER = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
SHAPE = TinyShape(2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=3712, context=512)
END = tiny_tokenizer.SPECIAL_TOKENS.index("<|end|>")


@pytest.fixture(scope="module")
def model() -> TrainingModel:
    made = TrainingModel(SHAPE, seed=5)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() == 2:
                weight.mul_(6)
    return made


@pytest.fixture(scope="module")
def asker(model: TrainingModel, tmp_path_factory: pytest.TempPathFactory) -> ModelAnswers:
    folder = tmp_path_factory.mktemp("a") / "model"
    tiny_folder.write_model(folder, model, TOKENIZER, torch.float32)
    return ModelAnswers(folder, context=512)


def prompts(count: int) -> list[list[int]]:
    choose = random.Random(1)
    return [choose.choices(range(10, 3600), k=choose.randint(1, 90)) for _ in range(count)]


@torch.no_grad()
def plainly(model: TrainingModel, prompt: list[int], most: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] != END):
        ids.append(int(model.logits(model(torch.tensor([ids]))[0, -1]).argmax()))
    return ids[len(prompt) :]


def test_answers_are_the_models_own(model: TrainingModel, asker: ModelAnswers) -> None:
    asked = prompts(9)
    most = [index + 1 for index in range(9)]
    found = asker.greedy(asked, most)
    assert found == [plainly(model, *each) for each in zip(asked, most, strict=True)]
    assert len({tuple(answer[:1]) for answer in found}) > 3


def test_more_prompts_than_fit_at_once_change_nothing(
    asker: ModelAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(20)
    whole = asker.greedy(asked, [6] * 20)
    monkeypatch.setattr(answering, "_AT_ONCE", 3)
    monkeypatch.setattr(answering, "_STEP_TOKENS", 64)
    assert asker.greedy(asked, [6] * 20) == whole


def test_an_answer_ends_with_the_end_token(tmp_path: Path) -> None:
    made = TrainingModel(SHAPE, seed=5)
    with torch.no_grad():
        made.model.norm.weight.zero_()  # all logits are equal: the lowest id is said
        made.model.embed_tokens.weight.zero_()
    tiny_folder.write_model(tmp_path / "m", made, TOKENIZER, torch.float32)
    assert ModelAnswers(tmp_path / "m", context=512).greedy([[9, 8]], [5]) == [[0] * 5]
    path = tmp_path / "m" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0}))
    assert ModelAnswers(tmp_path / "m", context=512).greedy([[9, 8]], [5]) == [[0]]


@torch.no_grad()
def test_best_is_the_likeliest_next_token_everywhere(
    model: TrainingModel, asker: ModelAnswers
) -> None:
    asked = prompts(3)
    for tokens, found in zip(asked, asker.best(asked), strict=True):
        wanted = model.logits(model(torch.tensor([tokens]))[0]).argmax(-1)
        assert found == wanted.tolist()
