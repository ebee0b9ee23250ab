"""Which share of a model each rank holds, and which models no number of ranks divides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.rank_split import RankSplit, check_split, possible_ranks, spec_of_rank
from baton.runtime.errors import ConfigError


@pytest.fixture
def spec(spec_of) -> ModelSpec:
    return replace(spec_of(), heads=8, kv_heads=2, ffn_size=96, vocab_size=199)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shares_cover_everything_once(spec: ModelSpec, ranks: int) -> None:
    splits = [RankSplit(ranks, rank) for rank in range(ranks)]
    assert [token for split in splits for token in split.share(199)] == list(range(199))
    parts = [spec_of_rank(spec, split) for split in splits]
    assert sum(part.heads for part in parts) == 8
    assert sum(part.ffn_size for part in parts) == 96
    assert sum(part.vocab_size for part in parts) == 199


@pytest.mark.parametrize(
    ("ranks", "held"), [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])]
)
def test_ranks_hold_the_kv_heads_of_their_queries(ranks: int, held: list[list[int]]) -> None:
    found = [RankSplit(ranks, rank).kv_heads(2) for rank in range(ranks)]
    assert [list(heads) for heads in found] == held
    for rank, heads in enumerate(found):  # eight query heads, four for each KV head
        assert {query // 4 for query in RankSplit(ranks, rank).share(8)} == set(heads)


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({}, 3, "does not divide the model's 8 attention heads: give one of 1, 2, 4, 8"),
        ({"ffn_size": 100}, 8, "does not divide the model's 100 MLP columns: give one of 1, 2, 4"),
        ({"heads": 12, "kv_heads": 3}, 2, "nor the model's 3 KV heads"),
        ({}, 0, "give a number from 1 to 64"),
        ({}, 65, "give a number from 1 to 64"),
    ],
)
def test_what_does_not_divide_is_named(
    spec: ModelSpec, changes: dict[str, int], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_split(replace(spec, **changes), ranks)


def test_possible_ranks_are_those_that_are_accepted(spec: ModelSpec) -> None:
    for ranks in range(1, 65):
        if ranks in possible_ranks(spec):
            check_split(spec, ranks)
        else:
            with pytest.raises(ConfigError):
                check_split(spec, ranks)
