"""Which share of a model each rank holds, and which models no number of ranks divides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.moe_spec import ExpertsSpec
from baton.engine.spec.rank_split import (
    RankSplit,
    check_split,
    possible_groups,
    possible_ranks,
    spec_of_rank,
)
from baton.runtime.errors import ConfigError


@pytest.fixture
def spec(spec_of: Callable[..., ModelSpec]) -> ModelSpec:
    return replace(spec_of(), heads=8, kv_heads=2, ffn_size=96, vocab_size=199)


@pytest.fixture
def mixture(spec: ModelSpec) -> ModelSpec:
    return replace(spec, experts=ExpertsSpec((True,), 6, 2, 40, shared_ffn_size=80))


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


@pytest.mark.parametrize(
    ("ranks", "ep", "held", "slices"),
    [
        (2, 1, [(0, 6), (0, 6)], [0, 1]),
        (2, 2, [(0, 3), (3, 6)], [0, 0]),
        (4, 2, [(0, 3), (0, 3), (3, 6), (3, 6)], [0, 1, 0, 1]),
    ],
)
def test_groups_of_ranks_hold_different_experts(
    mixture: ModelSpec, ranks: int, ep: int, held: list[tuple[int, int]], slices: list[int]
) -> None:
    splits = [RankSplit(ranks, rank, ep) for rank in range(ranks)]
    assert [split.slice for split in splits] == slices
    for split, experts in zip(splits, held, strict=True):
        part = spec_of_rank(mixture, split)
        assert part.experts is not None and part.experts.held == experts
        assert part.experts.count == 6  # the gate chooses among all of them
        assert part.experts.ffn_size == 40 * ep // ranks
        assert part.experts.shared_ffn_size == 80 // ranks
        assert part.heads == 8 // ranks and part.ffn_size == 96 // ranks


@pytest.mark.parametrize(
    ("ranks", "ep", "said"),
    [
        (4, 4, "model's 6 experts, .*; give worker.ep one of 1, 2"),
        (4, 3, "worker.ep is 3 and worker.tp 4: worker.ep must divide worker.tp"),
        (2, 4, "give worker.ep one of 1, 2"),
        (3, 3, "worker.tp is 3, which does not divide the model's 8 attention heads"),
    ],
)
def test_groups_that_do_not_divide_are_named(
    mixture: ModelSpec, ranks: int, ep: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_split(mixture, ranks, ep)


def test_groups_of_a_model_without_experts_are_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"worker.ep is 2, but a \w+ model has no experts"):
        check_split(spec, 2, 2)


def test_whole_experts_allow_ranks_that_divide_no_expert(mixture: ModelSpec) -> None:
    experts = ExpertsSpec((True,), 4, 2, 33)
    odd = replace(mixture, experts=experts)
    assert possible_groups(experts, 4) == [4] and possible_ranks(odd) == [1, 2, 4]
    check_split(odd, 4, 4)
    with pytest.raises(ConfigError, match="33 columns of an expert; give worker.ep one of 4"):
        check_split(odd, 4, 1)
