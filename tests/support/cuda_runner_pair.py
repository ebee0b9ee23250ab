"""A runner of graphs on a CPU, where nothing is captured, and a plain one to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.checkpoint.weights import load_weights
from baton.engine.cpu.linear import CpuMatrices
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.decode_graph import BUCKETS, DecodeGraphs
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.graph_device import HostDevice
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.noise import gumbel, noise_bits, stream_key, stream_start
from baton.engine.scheduling.batch import Draw, Slice, StepBatch, StepResult
from baton.runtime.sampling import SamplingParams
from tests.support import torch_kernels

GREEDY = SamplingParams(temperature=0.0)
BLOCKS, SIZE = 60, 8


class Recorder(HostDevice):
    """Counts captured graphs and replayed steps; `on_replay` is called before each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = self.replayed = 0
        self.on_replay: Callable[[], object] = lambda: None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        self.captured += 1
        draws = self.captured % 2 == 0  # the second graph of a bucket

        def replay() -> None:
            self.replayed += draws
            self.on_replay()
            work()

        return replay


def draw(
    logits: torch.Tensor, rules: DrawRules, tokens: torch.Tensor, finite: torch.Tensor
) -> None:
    """Draw by the rules in torch, row by row."""
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


class RunnerPair:
    """A runner of graphs and a plain one, with the same blocks in pools of their own."""

    def __init__(self, folder: Path, buckets: Sequence[int] = BUCKETS, max_rows: int = 12) -> None:
        self.plain = build_runner(
            folder, EngineOptions(blocks=BLOCKS, block_size=SIZE, backend="torch")
        )
        spec = self.plain.spec
        weights = load_weights(folder, spec, torch.float32, CpuMatrices(batch_invariant=False))
        pool = KvPool(spec, BLOCKS, SIZE, torch.float32, torch.device("cpu"))
        pool.tensor.fill_(float("nan"))
        self.plain.pool.tensor.fill_(float("nan"))
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

    def prompt(self, length: int, seed: int) -> list[int]:
        """Compute a random prompt with both, and return its blocks."""
        torch.manual_seed(seed)
        tokens = torch.randint(0, 199, (length,)).tolist()
        blocks = [self._free.pop() for _ in range(length // SIZE + 2)]
        self.both(Slice(tokens, 0, blocks))
        return blocks

    def both(self, *slices: Slice) -> StepResult:
        ours, theirs = (x.run(StepBatch(slices)) for x in (self.runner, self.plain))
        assert same(ours, theirs) and ours.broken == theirs.broken
        return ours


def same(ours: StepResult, theirs: StepResult) -> bool:
    """Return whether two steps drew the same, with the same logprobs but for rounding."""
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


def decode(
    token: int, start: int, blocks: list[int], params: SamplingParams = GREEDY, **fields: Any
) -> Slice:
    return Slice([token], start, blocks, (Draw(0, start + 1, params),), **fields)


RULES = [
    SamplingParams(temperature=0.0, repetition_penalty=3.0, top_logprobs=3),
    SamplingParams(temperature=0.7, seed=3, frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingParams(temperature=0.0, logit_bias=((7, 4.0), (9, -3.0), (7, 5.0)), top_logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=0.8, logit_bias=((7, -100.0),)),
]
