"""The command that measures the models, as a new installation has it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.models.embedded import embedded_draft, embedded_model
from baton.models.evaluation import evaluate


def test_without_a_folder_the_models_of_the_package_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where nothing was trained
    measured = Mock(return_value=(Mock(), []))
    monkeypatch.setattr(evaluate, "evaluate", measured)
    monkeypatch.setattr(evaluate, "show", Mock())
    evaluate.main([])
    folder, *_ = measured.call_args.args
    assert folder / "baton-tiny" == embedded_model()
    assert (folder / "baton-tiny-draft").samefile(embedded_draft())
