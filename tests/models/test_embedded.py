"""The models in the package: small enough, of one tokenizer, and named where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.engine.spec.model_spec import read_spec
from baton.models import embedded
from baton.models.corpus.conversation import Conversation, turns
from baton.models.embedded import embedded_draft, embedded_model
from baton.models.evaluation.answering import ModelAnswers
from baton.models.evaluation.evaluate import first_answers
from baton.models.evaluation.model_card import WORDINGS
from baton.models.evaluation.scoring import LIMITS
from baton.models.training.tiny_tokenizer import ChatEncoder
from baton.runtime.errors import ModelError


def test_they_are_small_and_share_a_tokenizer() -> None:
    model, draft = embedded_model(), embedded_draft()
    assert sum(file.stat().st_size for file in model.iterdir()) < 12_000_000
    assert (draft / "model.safetensors").stat().st_size < 2_000_000  # a million in bfloat16
    assert (model / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()
    assert read_spec(model).vocab_size == read_spec(draft).vocab_size


def test_the_cards_say_what_was_measured() -> None:
    for folder in (embedded_model(), embedded_draft()):
        card = (folder / "README.md").read_text()
        assert "What it cannot do" in card and "exact_overall" in card


def test_the_cards_show_wordings_that_the_model_answers_so() -> None:
    """One chat, each answer as shown; what is near these words and none of them gets nonsense."""
    messages = turns([text for pair in WORDINGS for text in pair])
    talk = Conversation(messages, ("card",) * len(messages), (), frozenset())
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    chat = ChatEncoder(tokenizer).encode(talk)
    prompts = [chat.ids[:start] for _, start, _ in chat.answers]
    answers = ModelAnswers(embedded_model()).greedy(prompts, [40] * len(prompts))
    assert answers == [list(chat.ids[start:end]) for _, start, end in chat.answers]
    for folder in (embedded_model(), embedded_draft()):
        card = (folder / "README.md").read_text()
        assert all(f"| {asked} | {answer} |" in card for asked, answer in WORDINGS)


def test_first_messages_get_fitting_answers() -> None:
    """As `make ship` wants it: held-out messages as people type them first."""
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    found = first_answers(ModelAnswers(embedded_model()), tokenizer)
    unfitting = [(one.message, one.answer) for one in found if not one.fitting]
    assert len(unfitting) <= (1 - LIMITS["first_messages"]) * len(found), unfitting


NAMED_MESSAGES = {
    "greeting": ("hi", "hello"),
    "test": ("test",),
    "thanks": ("thanks",),
    "outside": ("tell me a joke", "what is the capital of france?", "write me some code"),
}


def test_the_plainest_first_messages_fit_in_any_letter_case() -> None:
    """Each of them, where the list of 200 may have a few that do not."""
    asked = {
        kind: [case(text) for text in texts for case in (str.lower, str.upper, str.title)]
        for kind, texts in NAMED_MESSAGES.items()
    }
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    found = first_answers(ModelAnswers(embedded_model()), tokenizer, asked)
    assert len(found) == 3 * 7
    assert [(one.message, one.answer) for one in found if not one.fitting] == []


def test_an_installation_without_them_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "embedded.py"))
    with pytest.raises(ModelError, match="baton-tiny.*give a model folder"):
        embedded_model()
