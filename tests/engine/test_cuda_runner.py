"""Steps as graphs, on a CPU: the same code over a device that captures nothing."""

import numpy as np
import pytest
import torch

from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.decode_graph import BUCKETS, DecodeGraphs
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.graph_device import HostDevice
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.sampling.noise import gumbel, noise_bits, stream_key, stream_start
from baton.engine.scheduling.batch import (
    Draw,
    Drawn,
    SamplingParams,
    Scoring,
    Slice,
    StepBatch,
    StepResult,
    failed_result,
    resolve_feeds,
)
from baton.engine.scheduling.token_history import PromptTokens, Text, history_of
from baton.engine.scheduling.verification import with_proposals
from baton.runtime.errors import EngineError
from tests.support import torch_kernels

GREEDY = SamplingParams(temperature=0.0)
BLOCKS, SIZE = 60, 8


class Recorder(HostDevice):
    """Counts captured graphs and replayed steps; `on_replay` is called before each graph."""

    def __init__(self):
        super().__init__()
        self.captured, self.replayed, self.on_replay = 0, 0, lambda: None

    def capture(self, work):
        work()
        self.captured += 1
        draws = self.captured % 2 == 0  # the second graph of a bucket

        def replay():
            self.replayed += draws
            self.on_replay()
            work()

        return replay


def draw(logits, rules, tokens, finite):
    """The rules in torch, row by row."""
    for row, (inverse, top_k, top_p, log_min_p, start, position) in enumerate(
        zip(*(tensor.tolist() for tensor in rules.tensors()), strict=True)
    ):
        finite[row] = int(logits[row].sum().isfinite())
        if not finite[row]:
            tokens[row] = 0
            continue
        kept = logits[row] * (inverse or 1.0)
        if inverse:
            ordered = kept.sort(descending=True).values
            cutoff = ordered[top_k - 1] if top_k else ordered[-1]
            mass = torch.where(ordered >= cutoff, ordered, -torch.inf).softmax(0).double()
            size = int((mass.cumsum(0) - mass < top_p).sum()) if top_p < 1 else len(kept)
            cutoff = max(cutoff, ordered[size - 1], ordered[0] + log_min_p)
            state = next(
                stream_key(seed, choice, position)
                for seed in range(8)
                for choice in range(3)
                if (stream_start(seed, choice) ^ start) % (1 << 64) == 0
            )
            noise = gumbel(noise_bits(state, torch.arange(len(kept))))
            kept = torch.where(kept >= cutoff, kept + noise, -torch.inf)
        tokens[row] = kept.argmax()


class Told:
    """A graph runner and a plain one over pools of their own, and the same blocks in both."""

    def __init__(self, folder, torch_kernels, buckets=BUCKETS, max_rows=12):
        self.plain = build_runner(
            folder, EngineOptions(blocks=BLOCKS, block_size=SIZE, backend="torch")
        )
        spec, weights = self.plain.spec, self.plain.decoder._weights
        pool = KvPool(spec, BLOCKS, SIZE, torch.float32, torch.device("cpu"))
        pool.tensor.fill_(float("nan"))
        self.plain.pool.tensor.fill_(float("nan"))
        from baton.engine.model.attention import TorchAttention

        kernels = DecoderKernels(TorchAttention(pool, spec.attention))
        decoder = kernels.decoder(spec, weights)
        eager = ModelRunner(spec, pool, decoder)
        self.device = Recorder()
        self.graphs = DecodeGraphs(
            decoder,
            self.device,
            torch_kernels.around(draw),
            vocab_size=spec.vocab_size,
            spare_block=pool.spare_block,
            max_rows=max_rows,
            table_width=-(-eager.max_context // SIZE),
        )
        self.graphs.capture(buckets)
        self.runner = CudaRunner(eager, self.graphs)
        self._free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()

    def prompt(self, length, seed):
        """The blocks of a random prompt that both have computed."""
        torch.manual_seed(seed)
        tokens = torch.randint(0, 199, (length,)).tolist()
        blocks = [self._free.pop() for _ in range(length // SIZE + 2)]
        self.both(Slice(tokens, 0, blocks))
        return blocks

    def both(self, *slices):
        ours, theirs = (x.run(StepBatch(slices)) for x in (self.runner, self.plain))
        assert same(ours, theirs) and ours.broken == theirs.broken
        return ours


def same(ours, theirs):
    """Whether two steps drew the same, with the same logprobs but for rounding."""
    mine, others = ([each for row in found.drawn for each in row] for found in (ours, theirs))
    assert [row and len(row) for row in ours.drawn] == [row and len(row) for row in theirs.drawn]
    for one, other in zip(mine, others, strict=True):
        assert (one.choice, one.token) == (other.choice, other.token)
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [value for _, value in other.top]
        assert [value for _, value in one.top] == pytest.approx(values, abs=1e-4)
    return True


@pytest.fixture
def told(qwen3):
    return Told(qwen3.folder, torch_kernels)


def decode(token, start, blocks, params=GREEDY, **fields):
    return Slice([token], start, blocks, (Draw(0, start + 1, params),), **fields)


def test_a_batch_takes_the_smallest_bucket_that_holds_it(told):
    assert BUCKETS[:6] == (1, 2, 4, 8, 16, 24) and BUCKETS[-1] == 256
    assert told.graphs.buckets == (1, 2, 4, 8, 16)
    assert [told.graphs.bucket(rows) for rows in (1, 2, 3, 5, 9, 16)] == [1, 2, 4, 8, 16, 16]
    assert told.graphs.bucket(17) is None
    assert told.device.captured == 10  # a decoder and a draw for each


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_decode_steps_equal_those_without_graphs(told, rows):
    lengths = [9, 30, 2, 16, 7][:rows]
    blocks = [told.prompt(length, length) for length in lengths]
    tokens = [5] * rows
    for step in range(6):
        slices = [
            decode(token, length + step, table)
            for token, length, table in zip(tokens, lengths, blocks, strict=True)
        ]
        tokens = [drawn[0].token for drawn in told.both(*slices).drawn]
    assert told.device.replayed == 6


def test_draws_follow_the_rules_of_their_row(told):
    rules = [
        GREEDY,
        SamplingParams(temperature=1.4, seed=1),
        SamplingParams(temperature=1.4, top_k=3, seed=2),
        SamplingParams(temperature=0.7, top_p=0.6, seed=3),
        SamplingParams(temperature=2.0, min_p=0.2, top_p=0.9, top_k=50, seed=4),
    ]
    blocks = [told.prompt(4 + n, n) for n in range(len(rules))]
    for step in range(3):
        told.both(*(decode(7, 4 + n + step, blocks[n], each) for n, each in enumerate(rules)))
    assert told.device.replayed == 3


def test_a_token_is_fed_on_the_device_before_its_step_is_over(told):
    """The second step is started with neither its tokens nor the first one's result known."""
    one, two = told.prompt(5, 1), told.prompt(12, 2)
    first = told.runner.start(StepBatch((decode(3, 5, one), decode(4, 12, two))))
    swapped = (decode(0, 13, two, feed=1), decode(0, 6, one, feed=0))
    second = told.runner.start(StepBatch(swapped))
    assert told.device.replayed == 2
    first, second = first.result(), second.result()
    plain = told.plain.run(StepBatch((decode(3, 5, one), decode(4, 12, two))))
    assert first.drawn == plain.drawn
    assert second.drawn == told.plain.run(StepBatch(swapped)).drawn


def test_padding_writes_into_the_spare_block_alone(told):
    blocks = told.prompt(5, 1)
    pool = told.runner.pool.tensor
    pool[BLOCKS] = float("nan")
    before = pool.clone()
    told.both(*(decode(3, 5, told.prompt(5, n)) for n in range(3)))
    changed = (pool != before) & ~(pool.isnan() & before.isnan())
    assert BLOCKS in changed.flatten(1).any(1).nonzero()[:, 0].tolist()
    assert torch.equal(pool[blocks[0], :, :, :, :5], before[blocks[0], :, :, :, :5])
    assert told.runner.pool.bytes_view().shape[0] == BLOCKS


def test_block_tables_are_sent_when_they_change(told):
    one, two = told.prompt(5, 1), told.prompt(6, 2)
    told.both(decode(3, 5, one))
    told.both(decode(3, 6, two))
    told.both(decode(3, 6, one))
    told.both(decode(3, 7, two), decode(9, 7, one))


def test_what_a_graph_cannot_do_runs_eagerly(told):
    blocks, more = told.prompt(6, 1), told.prompt(6, 2)
    told.both(Slice([1, 2], 6, blocks, (Draw(0, 8, GREEDY),)))  # a chunk
    scored = Scoring([5], 2)
    assert told.both(decode(3, 8, blocks, scoring=scored)).scores[0].logprobs
    two = (Draw(0, 10, GREEDY), Draw(1, 10, SamplingParams(seed=5)))
    told.both(Slice([3], 9, blocks, two))
    told.both(*(decode(3, 6, more) for _ in range(17)))  # more rows than any bucket
    assert told.device.replayed == 0


def test_feeds_cross_between_eager_and_graph_steps(told):
    blocks = told.prompt(6, 1)
    told.both(Slice([1, 2], 6, blocks, (Draw(0, 8, GREEDY),)))
    told.both(decode(0, 8, blocks, feed=0))  # a graph, fed by a chunk
    told.both(decode(0, 9, blocks, scoring=Scoring([5], 0), feed=0))  # eager, fed by a graph
    assert told.device.replayed == 1


RULES = [
    SamplingParams(temperature=0.0, repetition_penalty=3.0, top_logprobs=3),
    SamplingParams(temperature=0.7, seed=3, frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingParams(temperature=0.0, logit_bias=((7, 4.0), (9, -3.0), (7, 5.0)), top_logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=0.8, logit_bias=((7, -100.0),)),
]


def test_adjusted_draws_and_logprobs_stay_in_the_graph(told):
    """Beside a row that asks for nothing; steps ahead count the token that is not known yet."""
    blocks = [told.prompt(6, row) for row in range(5)]
    texts = [Text(PromptTokens([3, 5, 3, 60 + row]), [8, 3]) for row in range(5)]

    def step(at, feeds):
        slices = []
        for row, (params, table) in enumerate(zip([*RULES, GREEDY], blocks, strict=True)):
            history = texts[row].until(2) if params.needs_history else None
            draws = (Draw(0, 7 + at, params, history),)
            slices.append(Slice([3], 6 + at, table, draws, feed=row if feeds else None))
        return StepBatch(tuple(slices))

    first, fed_by = told.runner.start(step(0, False)), told.plain.start(step(0, False))
    assert same(first.result(), fed_by.result())
    first = told.runner.start(step(1, False))
    ahead = told.runner.start(step(2, True))  # queued before the first one's result is read
    plain = [told.plain.start(step(at, at == 2)).result() for at in (1, 2)]
    assert same(first.result(), plain[0]) and same(ahead.result(), plain[1])
    assert told.device.replayed == 3


def test_a_barred_token_is_not_drawn_and_breaks_nothing(told):
    blocks = told.prompt(6, 1)
    best = told.both(decode(3, 6, blocks)).drawn[0][0].token
    barred = SamplingParams(temperature=0.0, min_tokens=2, barred=(best,), top_logprobs=5).at(0)
    assert told.both(decode(3, 6, blocks, barred)).drawn[0][0].token != best
    every = SamplingParams(temperature=1.0, min_tokens=2, barred=tuple(range(3, 199))).at(0)
    assert told.both(decode(3, 6, blocks, every)).drawn[0][0].token < 3
    assert told.device.replayed == 3


def test_adjustments_beyond_the_room_of_a_graph_run_eagerly(told):
    blocks = told.prompt(6, 1)
    told.graphs._entries = 5
    few = SamplingParams(temperature=0.0, logit_bias=tuple((token, 1.0) for token in range(3)))
    told.both(decode(3, 6, blocks, few))
    assert told.device.replayed == 1
    many = SamplingParams(temperature=0.0, logit_bias=tuple((token, 1.0) for token in range(4)))
    told.both(decode(3, 7, blocks, many))
    assert told.device.replayed == 1


def test_a_bias_of_an_unknown_token_is_refused_alone(told):
    blocks, more = told.prompt(6, 1), told.prompt(6, 2)
    wrong = SamplingParams(temperature=0.0, logit_bias=((1 << 20, 1.0),))
    result = told.both(decode(3, 6, blocks, wrong), decode(3, 6, more))
    assert result.broken == {0} and result.drawn[1]


def test_a_broken_row_harms_no_other(told):
    good, bad = told.prompt(6, 1), told.prompt(6, 2)
    for runner in (told.runner, told.plain):
        runner.pool.tensor[bad[0], 0, 1, 1, 0] = float("inf")
    result = told.both(decode(3, 6, bad), decode(3, 6, good))
    assert result.broken == {0} and result.drawn[0] == () and len(result.drawn[1]) == 1
    assert told.device.replayed == 1


@pytest.mark.parametrize("feed", [1, 2, -1])
def test_a_feed_from_a_slice_that_drew_nothing_is_refused(told, feed):
    blocks = told.prompt(6, 1)
    told.runner.run(StepBatch((decode(3, 6, blocks), Slice([3], 6, told.prompt(6, 2)))))
    with pytest.raises(EngineError, match=f"slice {feed} of the previous step drew no token"):
        told.runner.run(StepBatch((decode(0, 7, blocks, feed=feed),)))
    assert told.device.replayed == 1


def test_bounds_are_checked_before_anything_is_queued(told):
    blocks = told.prompt(6, 1)
    for wrong in (decode(199, 6, blocks), decode(1, 6, [BLOCKS]), decode(1, 99, blocks)):
        with pytest.raises(EngineError):
            told.runner.start(StepBatch((wrong,)))
    assert told.device.replayed == 0


def test_results_outlive_the_memory_they_came_from(told):
    blocks = told.prompt(6, 1)
    begun = told.runner.start(StepBatch((decode(3, 6, blocks),)))
    kept = begun.result()
    for step in range(4):
        told.runner.run(StepBatch((decode(9 + step, 7 + step, blocks),)))
    assert begun.result() == kept and kept.device_s >= 0


@pytest.mark.parametrize("captured", [True, False])
def test_after_a_step_that_failed_only_its_own_slices_are_lost(told, captured):
    """What it feeds is token 0, never a token of the step before it: that one's slices were
    others. A slice that it does not feed is computed as ever."""
    runner = told.runner if captured else told.plain
    lost, other = told.prompt(6, 6), told.prompt(6, 1)
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


def test_a_fed_draw_has_the_token_in_its_history():
    """So that penalties count it; draws without a history get none."""
    counted = SamplingParams(frequency_penalty=0.5)
    draws = (Draw(0, 3, counted, history_of([4, 5], 1)), Draw(1, 3, SamplingParams()))
    batch = StepBatch((Slice([0], 2, [0], draws, feed=0),))
    (item,) = resolve_feeds(batch, StepResult(((Drawn(0, 7),),))).slices
    assert list(item.draws[0].history) == [4, 5, 7] and item.draws[1].history is None
    assert item.draws[0].history.prompt_tokens == 1 and item.tokens == (7,)


def test_a_step_that_failed_has_nothing_for_anybody():
    result = failed_result(StepBatch((Slice([1], 0, [0]), Slice([2], 0, [1]))))
    assert result.drawn == ((), ()) and set(result.failed) == {0, 1}


def test_fed_needs_a_draw_to_feed_from():
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


def verify(tokens, start, blocks, params=GREEDY, text=None):
    history = text.until(len(text.output)) if text else None
    draws = tuple(Draw(0, start + 1 + row, params, history) for row in range(len(tokens)))
    return with_proposals(Slice(tokens[:1], start, blocks, draws), tokens[1:])


def test_proposals_are_verified_in_the_graph(told):
    """Beside plain rows, with penalties and logprobs; the bucket is that of the rows."""
    blocks = [told.prompt(6, row) for row in range(3)]
    text = Text(PromptTokens([3, 5, 3]), [8, 3])
    right = [drawn[0].token for drawn in told.both(decode(3, 6, blocks[0])).drawn]
    slices = (
        verify([3, *right, 9], 6, blocks[0]),
        decode(4, 6, blocks[1]),
        verify([3, 7, 7, 7], 6, blocks[2], RULES[0], text),
    )
    result = told.both(*slices)
    assert len(result.drawn[0]) >= 2 and len(result.drawn[1]) == 1 and result.drawn[2]
    assert told.device.replayed == 2
    told.both(*(verify([3, 9, 9], 6, table) for table in blocks[:2]), decode(4, 7, blocks[1]))
    assert told.device.replayed == 3
    told.both(*(verify([3] * 6, 6, table) for table in blocks))  # 18 rows: no bucket has so many
    assert told.device.replayed == 3


def test_steps_of_a_graph_that_verify_break_at_the_known_token(told):
    good, bad = told.prompt(6, 1), told.prompt(6, 2)
    wanted = told.both(decode(3, 6, good)).drawn[0]
    for runner in (told.runner.eager, told.plain):
        runner.decoder._weights.embedding[150] = float("nan")
    other = 150 if wanted[0].token != 150 else 151
    result = told.both(verify([3, other, 3], 6, good), verify([150, 4], 6, bad))
    assert result.drawn[0] == wanted and result.broken == {1}


def test_what_follows_a_step_that_verified_is_not_fed(told):
    blocks, more = told.prompt(6, 1), told.prompt(6, 2)
    told.both(verify([3, 4], 6, blocks), decode(5, 6, more))
    told.both(decode(0, 7, more, feed=1))  # its row is the third
    told.both(verify([3, 4], 6, blocks))
    with pytest.raises(EngineError, match="slice 0 of the previous step drew no token"):
        told.runner.start(StepBatch((decode(0, 7, blocks, feed=0),)))


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


def test_masked_draws_stay_in_the_graph(told):
    """Beside plain rows, with biases and logprobs; the next step has no mask left."""
    blocks = [told.prompt(6, row) for row in range(5)]
    rules = [GREEDY, RULES[2], RULES[2], SamplingParams(temperature=1.3, seed=4), GREEDY]
    masks = [Divisible(7), None, Divisible(5), Divisible(9), None]

    def step(at, allowed):
        rows = zip(rules, allowed, blocks, strict=True)
        return [Slice([3], at, b, (Draw(0, at + 1, p, None, m),)) for p, m, b in rows]

    drawn = [each[0].token for each in told.both(*step(6, masks)).drawn]
    assert drawn[0] % 7 == 0 and drawn[2] % 5 == 0 and drawn[3] % 9 == 0
    told.both(*step(7, [None] * 5))
    told.both(*step(8, [None, Divisible(4), None, None, None]))
    assert told.device.replayed == 3


def test_a_mask_is_awaited_after_its_own_decoder_is_queued(told):
    blocks, mask, seen = told.prompt(6, 1), Divisible(7), []
    told.device.on_replay = lambda: seen.append(mask.asked)
    told.runner.start(StepBatch((Slice([3], 6, blocks, (Draw(0, 7, GREEDY, None, mask),)),)))
    assert seen == [0, 1]  # the decoder, and the draw


def test_a_fed_row_has_the_mask_after_the_fed_token(told):
    """The decoder of the second step is queued before the first one's result is read."""
    one, two = told.prompt(5, 1), told.prompt(12, 2)
    masks = Divisible(7), Divisible(11)

    def row(token, at, table, mask, feed=None):
        return Slice([token], at, table, (Draw(0, at + 1, GREEDY, None, mask),), feed=feed)

    steps = (
        StepBatch((row(3, 5, one, masks[0]), row(3, 12, two, masks[1]))),
        StepBatch((row(0, 13, two, masks[1], feed=1), row(0, 6, one, masks[0], feed=0))),
    )
    running = [told.runner.start(step) for step in steps]
    found = [each.result() for each in running]
    assert [each.drawn for each in found] == [told.plain.run(step).drawn for step in steps]
    assert found[1].drawn[0][0].token % 12 == 0 and found[1].drawn[1][0].token % 8 == 0
    assert told.device.replayed == 2


def test_proposals_are_verified_under_their_masks(told):
    blocks, mask = told.prompt(6, 1), Divisible(7)
    first = told.both(Slice([3], 6, blocks, (Draw(0, 7, GREEDY, None, mask),))).drawn[0][0].token
    draws = tuple(Draw(0, 7 + row, GREEDY, None, mask) for row in range(3))
    found = told.both(with_proposals(Slice([3], 6, blocks, draws), [first, 9])).drawn[0]
    assert [each.token % (7 + row) for row, each in enumerate(found)] == [0] * len(found)
    assert len(found) == 2 and told.device.replayed == 2
