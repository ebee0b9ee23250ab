"""The options of ranks survive their way to the rank processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.ranks.rank_options import RankOptions


@pytest.mark.parametrize("draft", [None, Path("/draft")])
@pytest.mark.parametrize("store", [None, Path("/meeting/group")])
def test_parsed_options_equal_those_that_were_written(
    store: Path | None, draft: Path | None
) -> None:
    engine = EngineOptions(draft_folder=draft)
    options = RankOptions(1, 2, Path("/model"), engine, memory_bytes=(1, 2), store=store)
    assert RankOptions.parse(options.text()) == options
