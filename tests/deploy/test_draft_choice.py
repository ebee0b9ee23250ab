"""The draft model of a worker: its folder by the settings, its fingerprint, its flag."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from baton.deploy.processes.draft_choice import draft_fingerprint, draft_folder
from baton.deploy.serve.flag_values import proposer, proposer_settings
from baton.runtime.config import WorkerConfig
from baton.runtime.errors import ConfigError

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = MODELS / "baton-tiny", MODELS / "baton-tiny-draft"


@pytest.mark.parametrize("mode", ["off", "ngram", "suffix"])
def test_other_proposers_load_no_draft_model(mode: str) -> None:
    settings = WorkerConfig(speculate=mode)
    assert draft_folder(settings, TARGET) is None
    assert draft_fingerprint(settings, TARGET) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shipped_draft_model_needs_one_word(ranks: int) -> None:
    settings = WorkerConfig(speculate="draft", tp=ranks)
    assert draft_folder(settings, TARGET) == DRAFT
    assert len(draft_fingerprint(settings, TARGET)) == 32


def test_a_folder_of_ones_own_is_taken(tmp_path: Path) -> None:
    settings = WorkerConfig(speculate="draft", draft_model=str(DRAFT))
    assert draft_folder(settings, tmp_path / "model") == DRAFT


def test_a_missing_draft_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model-draft holds no model"):
        draft_folder(WorkerConfig(speculate="draft"), tmp_path / "model")


def test_a_head_lies_beside_its_model_or_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model-eagle3 holds no model: give the folder of an EA"):
        draft_folder(WorkerConfig(speculate="eagle3"), tmp_path / "model")


def test_the_flag_stands_for_both_settings(tmp_path: Path) -> None:
    assert proposer_settings(proposer("ngram")) == {"worker.speculate": "ngram"}
    assert proposer_settings(proposer("draft")) == {"worker.speculate": "draft"}
    for mode in ("draft", "eagle3"):
        assert proposer_settings(proposer(f"{mode}={tmp_path}")) == {
            "worker.speculate": mode,
            "worker.draft_model": str(tmp_path.resolve()),
        }


@pytest.mark.parametrize(
    "text", ["drafts", "ngram=x", "draft=", "draft=/no/such/folder", "eagle3="]
)
def test_a_wrong_flag_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        proposer(text)
