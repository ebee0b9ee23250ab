"""Steps of graphs that verify proposals or have masks, on a device that captures nothing."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.engine.scheduling.verification import with_proposals
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams
from tests.support.cuda_runner_pair import (
    GREEDY,
    RULES,
    RunnerPair,
    decode,
)
from tests.support.decoder_probe import parts_of


def verify(tokens, start, blocks, params=GREEDY, text=None):
    history = text.until(len(text.output)) if text else None
    draws = tuple(Draw(0, start + 1 + row, params, history) for row in range(len(tokens)))
    return with_proposals(Slice(tokens[:1], start, blocks, draws), tokens[1:])


def test_proposals_are_verified_in_the_graph(pair: RunnerPair) -> None:
    """Beside plain rows, with penalties and logprobs; the bucket is that of the rows."""
    blocks = [pair.prompt(6, row) for row in range(3)]
    text = Text(PromptTokens([3, 5, 3]), [8, 3])
    right = [drawn[0].token for drawn in pair.both(decode(3, 6, blocks[0])).drawn]
    slices = (
        verify([3, *right, 9], 6, blocks[0]),
        decode(4, 6, blocks[1]),
        verify([3, 7, 7, 7], 6, blocks[2], RULES[0], text),
    )
    result = pair.both(*slices)
    assert len(result.drawn[0]) >= 2 and len(result.drawn[1]) == 1 and result.drawn[2]
    assert pair.device.replayed == 2
    pair.both(*(verify([3, 9, 9], 6, table) for table in blocks[:2]), decode(4, 7, blocks[1]))
    assert pair.device.replayed == 3
    pair.both(*(verify([3] * 6, 6, table) for table in blocks))  # 18 rows: no bucket has so many
    assert pair.device.replayed == 3


def test_steps_of_a_graph_that_verify_break_at_the_known_token(pair: RunnerPair) -> None:
    good, bad = pair.prompt(6, 1), pair.prompt(6, 2)
    wanted = pair.both(decode(3, 6, good)).drawn[0]
    for runner in (pair.runner.eager, pair.plain):
        parts_of(runner.decoder).weights.embedding[150] = float("nan")
    other = 150 if wanted[0].token != 150 else 151
    result = pair.both(verify([3, other, 3], 6, good), verify([150, 4], 6, bad))
    assert result.drawn[0] == wanted and result.broken == {1}


def test_what_follows_a_step_that_verified_is_not_fed(pair: RunnerPair) -> None:
    blocks, more = pair.prompt(6, 1), pair.prompt(6, 2)
    pair.both(verify([3, 4], 6, blocks), decode(5, 6, more))
    pair.both(decode(0, 7, more, feed=1))  # its row is the third
    pair.both(verify([3, 4], 6, blocks))
    with pytest.raises(EngineError, match="slice 0 of the previous step drew no token"):
        pair.runner.start(StepBatch((decode(0, 7, blocks, feed=0),)))


class Divisible:
    """Admits the tokens that `step` plus the number of read tokens divides, once it is computed."""

    def __init__(self, step, read=()):
        self.step, self.read, self.asked = step, read, 0

    def bitmask(self):
        self.asked += 1
        bits = [token % (self.step + len(self.read)) == 0 for token in range(256)]
        return np.packbits(bits, bitorder="little").tobytes()

    def extended(self, tokens):
        return Divisible(self.step, (*self.read, *tokens))


def test_masked_draws_stay_in_the_graph(pair: RunnerPair) -> None:
    """Beside plain rows, with biases and logprobs; the next step has no mask left."""
    blocks = [pair.prompt(6, row) for row in range(5)]
    rules = [GREEDY, RULES[2], RULES[2], SamplingParams(temperature=1.3, seed=4), GREEDY]
    masks = [Divisible(7), None, Divisible(5), Divisible(9), None]

    def step(at, allowed):
        rows = zip(rules, allowed, blocks, strict=True)
        return [Slice([3], at, b, (Draw(0, at + 1, p, None, m),)) for p, m, b in rows]

    drawn = [each[0].token for each in pair.both(*step(6, masks)).drawn]
    assert drawn[0] % 7 == 0 and drawn[2] % 5 == 0 and drawn[3] % 9 == 0
    pair.both(*step(7, [None] * 5))
    pair.both(*step(8, [None, Divisible(4), None, None, None]))
    assert pair.device.replayed == 3


def test_a_mask_is_awaited_after_its_own_decoder_is_queued(pair: RunnerPair) -> None:
    blocks, mask, seen = pair.prompt(6, 1), Divisible(7), []
    pair.device.on_replay = lambda: seen.append(mask.asked)
    pair.runner.start(StepBatch((Slice([3], 6, blocks, (Draw(0, 7, GREEDY, None, mask),)),)))
    assert seen == [0, 1]  # the decoder, and the draw


def test_a_fed_row_has_the_mask_after_the_fed_token(pair: RunnerPair) -> None:
    """The decoder of the second step is queued before the first one's result is read."""
    one, two = pair.prompt(5, 1), pair.prompt(12, 2)
    masks = Divisible(7), Divisible(11)

    def row(token, at, table, mask, feed=None):
        return Slice([token], at, table, (Draw(0, at + 1, GREEDY, None, mask),), feed=feed)

    steps = (
        StepBatch((row(3, 5, one, masks[0]), row(3, 12, two, masks[1]))),
        StepBatch((row(0, 13, two, masks[1], feed=1), row(0, 6, one, masks[0], feed=0))),
    )
    running = [pair.runner.start(step) for step in steps]
    found = [each.result() for each in running]
    assert [each.drawn for each in found] == [pair.plain.run(step).drawn for step in steps]
    assert found[1].drawn[0][0].token % 12 == 0 and found[1].drawn[1][0].token % 8 == 0
    assert pair.device.replayed == 2


def test_proposals_are_verified_under_their_masks(pair: RunnerPair) -> None:
    blocks, mask = pair.prompt(6, 1), Divisible(7)
    first = pair.both(Slice([3], 6, blocks, (Draw(0, 7, GREEDY, None, mask),))).drawn[0][0].token
    draws = tuple(Draw(0, 7 + row, GREEDY, None, mask) for row in range(3))
    found = pair.both(with_proposals(Slice([3], 6, blocks, draws), [first, 9])).drawn[0]
    assert [each.token % (7 + row) for row, each in enumerate(found)] == [0] * len(found)
    assert len(found) == 2 and pair.device.replayed == 2
