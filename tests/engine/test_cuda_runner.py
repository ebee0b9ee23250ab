"""Steps as graphs, on a CPU: the same code over a device that captures nothing."""

from __future__ import annotations

import pytest
import torch

from baton.engine.execution.decode_graph import BUCKETS
from baton.engine.scheduling.batch import (
    Draw,
    Drawn,
    Scoring,
    Slice,
    StepBatch,
    StepResult,
    failed_result,
    resolve_feeds,
)
from baton.engine.scheduling.token_history import PromptTokens, Text, history_of
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams
from tests.support.cuda_runner_pair import (
    BLOCKS,
    GREEDY,
    RULES,
    RunnerPair,
    decode,
    same,
)
from tests.support.graph_buffers import limit_entries


def test_a_batch_takes_the_smallest_bucket_that_holds_it(pair: RunnerPair) -> None:
    assert BUCKETS[:6] == (1, 2, 4, 8, 16, 24) and BUCKETS[-1] == 256
    assert pair.graphs.buckets == (1, 2, 4, 8, 16)
    assert [pair.graphs.bucket(rows) for rows in (1, 2, 3, 5, 9, 16)] == [1, 2, 4, 8, 16, 16]
    assert pair.graphs.bucket(17) is None
    assert pair.device.captured == 10  # a decoder and a draw for each


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_decode_steps_equal_those_without_graphs(pair: RunnerPair, rows: int) -> None:
    lengths = [9, 30, 2, 16, 7][:rows]
    blocks = [pair.prompt(length, length) for length in lengths]
    tokens = [5] * rows
    for step in range(6):
        slices = [
            decode(token, length + step, table)
            for token, length, table in zip(tokens, lengths, blocks, strict=True)
        ]
        tokens = [drawn[0].token for drawn in pair.both(*slices).drawn]
    assert pair.device.replayed == 6


def test_draws_follow_the_rules_of_their_row(pair: RunnerPair) -> None:
    rules = [
        GREEDY,
        SamplingParams(temperature=1.4, seed=1),
        SamplingParams(temperature=1.4, top_k=3, seed=2),
        SamplingParams(temperature=0.7, top_p=0.6, seed=3),
        SamplingParams(temperature=2.0, min_p=0.2, top_p=0.9, top_k=50, seed=4),
    ]
    blocks = [pair.prompt(4 + n, n) for n in range(len(rules))]
    for step in range(3):
        pair.both(*(decode(7, 4 + n + step, blocks[n], each) for n, each in enumerate(rules)))
    assert pair.device.replayed == 3


def test_a_token_is_fed_on_the_device_before_its_step_is_over(pair: RunnerPair) -> None:
    """The second step is started with neither its tokens nor the first one's result known."""
    one, two = pair.prompt(5, 1), pair.prompt(12, 2)
    first = pair.runner.start(StepBatch((decode(3, 5, one), decode(4, 12, two))))
    swapped = (decode(0, 13, two, feed=1), decode(0, 6, one, feed=0))
    second = pair.runner.start(StepBatch(swapped))
    assert pair.device.replayed == 2
    first, second = first.result(), second.result()
    plain = pair.plain.run(StepBatch((decode(3, 5, one), decode(4, 12, two))))
    assert first.drawn == plain.drawn
    assert second.drawn == pair.plain.run(StepBatch(swapped)).drawn


def test_padding_writes_into_the_spare_block_alone(pair: RunnerPair) -> None:
    blocks = pair.prompt(5, 1)
    pool = pair.runner.pool.tensor
    pool[BLOCKS] = float("nan")
    before = pool.clone()
    pair.both(*(decode(3, 5, pair.prompt(5, n)) for n in range(3)))
    changed = (pool != before) & ~(pool.isnan() & before.isnan())
    assert BLOCKS in changed.flatten(1).any(1).nonzero()[:, 0].tolist()
    assert torch.equal(pool[blocks[0], :, :, :, :5], before[blocks[0], :, :, :, :5])
    assert pair.runner.pool.bytes_view().shape[0] == BLOCKS


def test_block_tables_are_sent_when_they_change(pair: RunnerPair) -> None:
    one, two = pair.prompt(5, 1), pair.prompt(6, 2)
    pair.both(decode(3, 5, one))
    pair.both(decode(3, 6, two))
    pair.both(decode(3, 6, one))
    pair.both(decode(3, 7, two), decode(9, 7, one))


def test_what_a_graph_cannot_do_runs_eagerly(pair: RunnerPair) -> None:
    blocks, more = pair.prompt(6, 1), pair.prompt(6, 2)
    pair.both(Slice([1, 2], 6, blocks, (Draw(0, 8, GREEDY),)))  # a chunk
    scored = Scoring([5], 2)
    assert pair.both(decode(3, 8, blocks, scoring=scored)).scores[0].logprobs
    two = (Draw(0, 10, GREEDY), Draw(1, 10, SamplingParams(seed=5)))
    pair.both(Slice([3], 9, blocks, two))
    pair.both(*(decode(3, 6, more) for _ in range(17)))  # more rows than any bucket
    assert pair.device.replayed == 0


def test_feeds_cross_between_eager_and_graph_steps(pair: RunnerPair) -> None:
    blocks = pair.prompt(6, 1)
    pair.both(Slice([1, 2], 6, blocks, (Draw(0, 8, GREEDY),)))
    pair.both(decode(0, 8, blocks, feed=0))  # a graph, fed by a chunk
    pair.both(decode(0, 9, blocks, scoring=Scoring([5], 0), feed=0))  # eager, fed by a graph
    assert pair.device.replayed == 1


def test_adjusted_draws_and_logprobs_stay_in_the_graph(pair: RunnerPair) -> None:
    """Beside a row that asks for nothing; steps ahead count the token that is not known yet."""
    blocks = [pair.prompt(6, row) for row in range(5)]
    texts = [Text(PromptTokens([3, 5, 3, 60 + row]), [8, 3]) for row in range(5)]

    def step(at, feeds):
        slices = []
        for row, (params, table) in enumerate(zip([*RULES, GREEDY], blocks, strict=True)):
            history = texts[row].until(2) if params.needs_history else None
            draws = (Draw(0, 7 + at, params, history),)
            slices.append(Slice([3], 6 + at, table, draws, feed=row if feeds else None))
        return StepBatch(tuple(slices))

    first, fed_by = pair.runner.start(step(0, False)), pair.plain.start(step(0, False))
    assert same(first.result(), fed_by.result())
    first = pair.runner.start(step(1, False))
    ahead = pair.runner.start(step(2, True))  # queued before the first one's result is read
    plain = [pair.plain.start(step(at, at == 2)).result() for at in (1, 2)]
    assert same(first.result(), plain[0]) and same(ahead.result(), plain[1])
    assert pair.device.replayed == 3


def test_a_barred_token_is_not_drawn_and_breaks_nothing(pair: RunnerPair) -> None:
    blocks = pair.prompt(6, 1)
    best = pair.both(decode(3, 6, blocks)).drawn[0][0].token
    barred = SamplingParams(temperature=0.0, min_tokens=2, barred=(best,), top_logprobs=5).at(0)
    assert pair.both(decode(3, 6, blocks, barred)).drawn[0][0].token != best
    every = SamplingParams(temperature=1.0, min_tokens=2, barred=tuple(range(3, 199))).at(0)
    assert pair.both(decode(3, 6, blocks, every)).drawn[0][0].token < 3
    assert pair.device.replayed == 3


def test_adjustments_beyond_the_room_of_a_graph_run_eagerly(pair: RunnerPair) -> None:
    blocks = pair.prompt(6, 1)
    limit_entries(pair.graphs, 5)
    few = SamplingParams(temperature=0.0, logit_bias=tuple((token, 1.0) for token in range(3)))
    pair.both(decode(3, 6, blocks, few))
    assert pair.device.replayed == 1
    many = SamplingParams(temperature=0.0, logit_bias=tuple((token, 1.0) for token in range(4)))
    pair.both(decode(3, 7, blocks, many))
    assert pair.device.replayed == 1


def test_a_bias_of_an_unknown_token_is_refused_alone(pair: RunnerPair) -> None:
    blocks, more = pair.prompt(6, 1), pair.prompt(6, 2)
    wrong = SamplingParams(temperature=0.0, logit_bias=((1 << 20, 1.0),))
    result = pair.both(decode(3, 6, blocks, wrong), decode(3, 6, more))
    assert result.broken == {0} and result.drawn[1]


def test_a_broken_row_harms_no_other(pair: RunnerPair) -> None:
    good, bad = pair.prompt(6, 1), pair.prompt(6, 2)
    for runner in (pair.runner, pair.plain):
        runner.pool.tensor[bad[0], 0, 1, 1, 0] = float("inf")
    result = pair.both(decode(3, 6, bad), decode(3, 6, good))
    assert result.broken == {0} and result.drawn[0] == () and len(result.drawn[1]) == 1
    assert pair.device.replayed == 1


@pytest.mark.parametrize("feed", [1, 2, -1])
def test_a_feed_from_a_slice_that_drew_nothing_is_refused(pair: RunnerPair, feed: int) -> None:
    blocks = pair.prompt(6, 1)
    pair.runner.run(StepBatch((decode(3, 6, blocks), Slice([3], 6, pair.prompt(6, 2)))))
    with pytest.raises(EngineError, match=f"slice {feed} of the previous step drew no token"):
        pair.runner.run(StepBatch((decode(0, 7, blocks, feed=feed),)))
    assert pair.device.replayed == 1


def test_bounds_are_checked_before_anything_is_queued(pair: RunnerPair) -> None:
    blocks = pair.prompt(6, 1)
    for wrong in (decode(199, 6, blocks), decode(1, 6, [BLOCKS]), decode(1, 99, blocks)):
        with pytest.raises(EngineError):
            pair.runner.start(StepBatch((wrong,)))
    assert pair.device.replayed == 0


def test_results_outlive_the_memory_they_came_from(pair: RunnerPair) -> None:
    blocks = pair.prompt(6, 1)
    begun = pair.runner.start(StepBatch((decode(3, 6, blocks),)))
    kept = begun.result()
    for step in range(4):
        pair.runner.run(StepBatch((decode(9 + step, 7 + step, blocks),)))
    assert begun.result() == kept and kept.device_s >= 0


@pytest.mark.parametrize("captured", [True, False])
def test_after_a_step_that_failed_only_its_own_slices_are_lost(
    pair: RunnerPair, captured: bool
) -> None:
    """What it feeds is token 0, never a token of the step before it: that one's slices were
    others. A slice that it does not feed is computed as ever."""
    runner = pair.runner if captured else pair.plain
    lost, other = pair.prompt(6, 6), pair.prompt(6, 1)
    runner.run(StepBatch((decode(3, 6, lost),)))
    with pytest.raises(EngineError, match="outside the pool"):
        runner.run(StepBatch((decode(3, 7, [BLOCKS] * len(lost)),)))
    after = runner.run(StepBatch((decode(0, 7, lost, feed=0), decode(5, 6, other))))
    again = runner.run(StepBatch((decode(0, 7, lost), decode(5, 6, other))))
    assert after.drawn == again.drawn
    with pytest.raises(EngineError, match="drew no token"):
        runner.run(StepBatch((decode(0, 8, lost, feed=2),)))
    with pytest.raises(EngineError, match="drew no token"):
        runner.run(StepBatch((decode(0, 8, lost, feed=1),)))  # of the step that was refused


def test_a_fed_draw_has_the_token_in_its_history() -> None:
    """So that penalties count it; draws without a history get none."""
    counted = SamplingParams(frequency_penalty=0.5)
    draws = (Draw(0, 3, counted, history_of([4, 5], 1)), Draw(1, 3, SamplingParams()))
    batch = StepBatch((Slice([0], 2, [0], draws, feed=0),))
    (item,) = resolve_feeds(batch, StepResult(((Drawn(0, 7),),))).slices
    assert list(item.draws[0].history) == [4, 5, 7] and item.draws[1].history is None
    assert item.draws[0].history.prompt_tokens == 1 and item.tokens == (7,)


def test_a_step_that_failed_has_no_results() -> None:
    result = failed_result(StepBatch((Slice([1], 0, [0]), Slice([2], 0, [1]))))
    assert result.drawn == ((), ()) and set(result.failed) == {0, 1}


def test_fed_needs_a_draw_to_feed_from() -> None:
    batch = StepBatch((Slice([0], 1, [0], feed=0),))
    with pytest.raises(EngineError, match="drew no token"):
        resolve_feeds(batch, None)
    with pytest.raises(EngineError, match="drew no token"):
        resolve_feeds(batch, StepResult(((),)))
    with pytest.raises(EngineError, match="slice -1"):
        resolve_feeds(StepBatch((Slice([0], 1, [0], feed=-1),)), StepResult(((Drawn(0, 7),),)))
    assert resolve_feeds(batch, StepResult(((),), 0.0, frozenset({0}))).slices[0].tokens == (0,)
    plain = StepBatch((Slice([4], 1, [0]),))
    assert resolve_feeds(plain, None) is plain
