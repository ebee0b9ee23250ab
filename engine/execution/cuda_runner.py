"""The runner of a CUDA device: captured graphs for decode steps, eager execution for all others.

A step of one-token slices, and of those that verify proposals, replays a graph; `start` returns
when it is queued, so that the next step is planned and queued while it runs. Where a grammar's mask
depends on the step before, `start` returns when that one has ended and the mask is known. Chunks,
larger batches, and penalties that exceed the graphs' buffers run eagerly and have ended when
`start` returns. Knows no queue; one thread at a time calls `start`, another may wait for results.
"""

from __future__ import annotations

from threading import Lock

from torch import Tensor

from baton.engine.execution.decode_graph import DecodeGraphs, GraphStep
from baton.engine.execution.runner import ModelRunner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.memory_plan import MemoryPlan
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.sampling.logit_bias import bias_arrays
from baton.engine.scheduling.batch import (
    Draw,
    Drawn,
    FinishedStep,
    RunningStep,
    Slice,
    StepBatch,
    StepResult,
    failed_result,
    resolve_feeds,
)
from baton.engine.scheduling.draw_costs import DrawCosts
from baton.engine.scheduling.verification import accepted
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import EngineError


class _GraphRun:
    """A running graph step. It keeps its result, since the buffers are reused. Both the thread
    that waits for the step and the thread that starts the step after the next read the result."""

    def __init__(self, batch: StepBatch, step: GraphStep) -> None:
        self._batch = batch
        self._step: GraphStep | None = step
        self._found: StepResult | None = None
        self._lock = Lock()

    def result(self) -> StepResult:
        with self._lock:
            if self._found is None:
                assert self._step is not None
                self._found = self._read(self._step)
                self._step = None
            return self._found

    def _read(self, step: GraphStep) -> StepResult:
        tokens, finite, seconds = step.wait()
        drawn: list[tuple[Drawn, ...]] = []
        broken = set()
        row = 0
        for index, item in enumerate(self._batch.slices):
            found = []
            for at, draw in enumerate(item.draws, row):
                if not finite[at]:
                    break  # a row of proposals that plain decoding may never compute
                found.append(step.drawn(at, draw, tokens[at]))
            drawn.append(accepted(item, found))
            if not finite[row]:
                broken.add(index)
            row += len(item.tokens)
        return StepResult(tuple(drawn), seconds, frozenset(broken))


class CudaRunner:
    """Runs steps like `ModelRunner`, and up to two of them at a time."""

    overlaps = True

    def __init__(self, eager: ModelRunner, graphs: DecodeGraphs) -> None:
        """`graphs`: captured, of the same decoder and pool."""
        self.eager, self.graphs = eager, graphs
        self._bounds = Bounds(
            eager.pool.blocks, eager.pool.block_size, eager.spec.vocab_size, eager.max_context
        )
        self.memory: MemoryPlan | None = None  # set by the loader
        self._last: RunningStep | None = None
        self._last_batch = StepBatch(())

    @property
    def spec(self) -> ModelSpec:
        return self.eager.spec

    @property
    def pool(self) -> KvPool:
        return self.eager.pool

    @property
    def max_context(self) -> int:
        return self.eager.max_context

    @property
    def numerics(self) -> str | None:
        return self.eager.numerics

    def close(self) -> None:
        """End nothing: graphs and buffers go with the process."""

    def start(self, batch: StepBatch) -> RunningStep:
        """Queue or run a step. The result of the step before the last one must have been read.

        Raises EngineError, before anything is written, if a slice breaks its bounds.
        """
        before, self._last = self._last, FinishedStep(failed_result(batch))
        if self._is_captured(batch):
            running: RunningStep = self._replay(batch, before)
        else:
            last = before.result() if before is not None else None
            running = FinishedStep(self.eager.run(resolve_feeds(batch, last)))
        self._last, self._last_batch = running, batch
        return running

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step to its end."""
        return self.start(batch).result()

    def measure_draws(self) -> DrawCosts:
        """Same as `ModelRunner.measure_draws`: graphs draw with the same kernels."""
        return self.eager.measure_draws()

    def all_logits(self, batch: StepBatch) -> list[Tensor]:
        """Same as `ModelRunner.all_logits`, which runs eagerly."""
        return self.eager.all_logits(batch)

    def _is_captured(self, batch: StepBatch) -> bool:
        draws = [draw for item in batch.slices for draw in item.draws]
        return (
            self.graphs.bucket(sum(len(item.tokens) for item in batch.slices)) is not None
            and all(map(_is_decode, batch.slices))
            and all(map(self._known_bias, draws))
            and self.graphs.holds(draws)
        )

    def _known_bias(self, draw: Draw) -> bool:
        """Return whether the model has all biased tokens; else an eager step refuses the slice."""
        bias = draw.params.logit_bias
        return not bias or bias_arrays(bias).known(self._bounds.vocab_size)

    def _replay(self, batch: StepBatch, before: RunningStep | None) -> _GraphRun:
        if isinstance(before, _GraphRun):
            feeds = [self._feeding_row(index, item) for index, item in enumerate(batch.slices)]
        else:
            batch = resolve_feeds(batch, before.result() if before is not None else None)
            feeds = [None] * len(batch.slices)
        layout = lay_out(batch, self._bounds)
        row_feeds: list[int | None] = []
        for item, feed in zip(batch.slices, feeds, strict=True):
            row_feeds += [feed] * len(item.tokens)  # a slice with a feed has one token

        def fed_draws() -> list[Draw | None]:
            return _row_draws(resolve_feeds(batch, before.result() if before else None))

        waits = any(
            feed is not None and any(draw.allowed is not None for draw in item.draws)
            for item, feed in zip(batch.slices, feeds, strict=True)
        )
        draws = _row_draws(batch)
        step = self.graphs.start(layout, draws, row_feeds, fed_draws if waits else None)
        return _GraphRun(batch, step)

    def _feeding_row(self, index: int, item: Slice) -> int | None:
        """Return the row of the previous step whose token slice `index` continues with."""
        feed, slices = item.feed, self._last_batch.slices
        if feed is None:
            return None
        if not 0 <= feed < len(slices) or len(slices[feed].draws) != 1:
            raise EngineError(f"slice {index}: slice {feed} of the previous step drew no token")
        return sum(len(before.tokens) for before in slices[:feed])


def _row_draws(batch: StepBatch) -> list[Draw | None]:
    """Return the draw of each row of decode slices; None for a row without."""
    return [draw for item in batch.slices for draw in item.draws or (None,)]


def _is_decode(item: Slice) -> bool:
    """Return whether each token of the slice is a row that draws at most once."""
    if item.scoring is not None or item.draft is not None:
        return False
    return bool(item.proposed) or (len(item.tokens) == 1 and len(item.draws) <= 1)
