"""The schedulers of the systems that made the A100 logs, on virtual time with a timing model.

    DistServe   prompt ─▶ context engine: whole prompts, first come first served ─▶ first token
                ─▶ waits in the context engine's KV ─▶ copied between two decode steps
                ─▶ waits in the decode engine's KV ─▶ decodes
    vLLM 0.2    one engine: a step of all prompts that have room, before any step that decodes

Neither keeps room for tokens to come: where KV runs out, DistServe swaps the youngest sequence to
the host's memory, and vLLM computes it again. Written after the published code of DistServe
(LLMServe/DistServe) and vLLM 0.2, with the limits of DistServe's start script. A pipeline of two
GPUs counts as one engine, with the step times that its logs show. Times are the timing model's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.planner.timing_model import StepWork, TimingModel
from baton.planner.traces import TraceRequest
from baton.runtime.worker.attention_pairs import causal_pairs
from baton.simulation.capacity.timeline import EventQueue

BLOCK_TOKENS = 16
CONTEXT_PROMPTS, CONTEXT_TOKENS = 128, 32_768  # of one step of the context engine
MIXED_TOKENS = 65_536  # of one step with prompts of vLLM
WAITING_SHARE = 0.05  # of the decode engine's pool; more prompts wait on the context engine
WATERMARK = 0.01  # of vLLM's pool, which prompts leave free
POLL_S = 0.003  # of an engine without work


@dataclass(slots=True, eq=False)
class Replayed:
    """A request, the tokens that it has, and the times of the first and the last one."""

    request: TraceRequest
    made: int = 0
    first_s: float = -1.0
    end_s: float = -1.0

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.made

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.arrived_s

    @property
    def mean_gap_s(self) -> float:
        return (self.end_s - self.first_s) / max(1, self.made - 1)

    def draw(self, now_s: float) -> bool:
        """Add a token; return whether it was the last."""
        self.made += 1
        if self.first_s < 0:
            self.first_s = now_s
        if self.made >= self.request.output_tokens:
            self.end_s = now_s
        return self.end_s >= 0


def blocks_of(requests: Iterable[Replayed]) -> int:
    """Return the blocks that the requests hold together."""
    return sum(each.blocks for each in requests)


def prompts_s(timing: TimingModel, prompts: Sequence[Replayed]) -> float:
    """Return the seconds of a step that computes these prompts whole."""
    pairs = sum(causal_pairs(0, each.tokens) for each in prompts)
    return timing.step_s(StepWork(sum(each.tokens for each in prompts), pairs))


def decode_s(timing: TimingModel, batch: Sequence[Replayed]) -> float:
    """Return the seconds of a step that draws a token for each."""
    context = sum(each.tokens for each in batch)
    return timing.step_s(StepWork(sequences=len(batch), context_tokens=context))


class DistServeEngines:
    """A context engine and a decode engine, each with its pool of blocks."""

    def __init__(
        self, timeline: EventQueue, timing: TimingModel, context_blocks: int, decode_blocks: int
    ) -> None:
        self.most_held = 0.0  # share of the decode engine's pool
        self._timeline, self._timing = timeline, timing
        self._context_blocks, self._decode_blocks = context_blocks, decode_blocks
        self._queue = deque[Replayed]()  # of the context engine
        self._computing: list[Replayed] = []
        self._computed = deque[Replayed]()  # with KV on the context engine
        self._accepted = deque[Replayed]()  # with KV on the decode engine, not yet in its batch
        self._swapped = deque[Replayed]()
        self._batch: list[Replayed] = []
        self._idle = True  # the decode engine

    def submit(self, request: Replayed) -> None:
        """Queue a request on the context engine."""
        self._queue.append(request)
        self._compute()

    def _compute(self) -> None:
        """Begin a step of the context engine, if none runs and a prompt has room."""
        if self._computing:
            return
        held, tokens = blocks_of(self._computed), 0
        while self._queue and len(self._computing) < CONTEXT_PROMPTS:
            first = self._queue[0]
            held, tokens = held + first.blocks, tokens + first.tokens
            if tokens > CONTEXT_TOKENS or held > self._context_blocks:
                break
            self._computing.append(self._queue.popleft())
        if self._computing:
            end_s = self._timeline.now_s + prompts_s(self._timing, self._computing)
            self._timeline.at(end_s, self._end_compute)

    def _end_compute(self) -> None:
        done, self._computing = self._computing, []
        self._computed.extend([each for each in done if not each.draw(self._timeline.now_s)])
        if self._computed and self._idle:
            self._idle = False
            self._timeline.at(self._timeline.now_s + POLL_S / 2, self._accept)
        self._compute()

    def _accept(self) -> None:
        """Copy the KV of the first prompt that waits for it, or begin a decode step."""
        if not self._computed or not self._has_room(self._computed[0]):
            self._decode()
            return
        first = self._computed[0]
        copied_s = self._timeline.now_s + self._timing.transfer_s(first.tokens)
        self._timeline.at(copied_s, self._copied)

    def _has_room(self, prompt: Replayed) -> bool:
        waiting = blocks_of(self._accepted)
        free = self._decode_blocks - blocks_of(self._batch) - waiting
        return waiting < WAITING_SHARE * self._decode_blocks and prompt.blocks <= free

    def _copied(self) -> None:
        self._accepted.append(self._computed.popleft())
        self._compute()
        self._accept()

    def _decode(self) -> None:
        """Begin a decode step with all that have room; swapped sequences come first."""
        waiting, held = blocks_of(self._accepted), blocks_of(self._batch)
        while held + waiting > self._decode_blocks:
            self._swapped.append(self._batch.pop())
            held -= self._swapped[-1].blocks
        for queue in (self._swapped, self._accepted):
            # a prompt that waits counts twice in their check: as waiting, and as the one to join
            while queue and held + waiting + queue[0].blocks <= self._decode_blocks:
                joins = queue.popleft()
                held += joins.blocks
                waiting -= joins.blocks if queue is self._accepted else 0
                self._batch.append(joins)
            if queue:
                break
        self.most_held = max(self.most_held, (held + waiting) / self._decode_blocks)
        self._idle = not self._batch
        if self._batch:
            end_s = self._timeline.now_s + decode_s(self._timing, self._batch)
            self._timeline.at(end_s, self._end_decode)

    def _end_decode(self) -> None:
        now_s = self._timeline.now_s
        self._batch = [each for each in self._batch if not each.draw(now_s)]
        self._accept()


class VllmEngine:
    """One engine that computes prompts and decodes, never both in one step."""

    def __init__(self, timeline: EventQueue, timing: TimingModel, blocks: int) -> None:
        self.most_held = 0.0  # share of the pool
        self._timeline, self._timing, self._blocks = timeline, timing, blocks
        self._queue = deque[Replayed]()
        self._running: list[Replayed] = []
        self._busy = False

    def submit(self, request: Replayed) -> None:
        """Queue a request."""
        self._queue.append(request)
        self._begin()

    def _begin(self) -> None:
        """Begin a step, if none runs: of prompts if one has room, else of a token each."""
        if self._busy:
            return
        step = self._prompts()
        if step:
            seconds = prompts_s(self._timing, step)
        else:
            while blocks_of(self._running) + self._growing() > self._blocks:
                self._queue.appendleft(self._running.pop())
            step = list(self._running)
            seconds = decode_s(self._timing, step)
        self.most_held = max(self.most_held, blocks_of(self._running) / self._blocks)
        self._busy = bool(step)
        if step:
            self._timeline.at(self._timeline.now_s + seconds, lambda: self._end(step))

    def _prompts(self) -> list[Replayed]:
        found: list[Replayed] = []
        held, tokens = blocks_of(self._running) + WATERMARK * self._blocks, 0
        while self._queue:
            first = self._queue[0]
            held, tokens = held + first.blocks, tokens + first.tokens
            if tokens > MIXED_TOKENS or held > self._blocks:
                break
            found.append(self._queue.popleft())
        return found

    def _growing(self) -> int:
        """Return the blocks that the next token of each needs."""
        return sum(not each.tokens % BLOCK_TOKENS for each in self._running)

    def _end(self, step: list[Replayed]) -> None:
        self._busy, now_s = False, self._timeline.now_s
        left = [each for each in step if not each.draw(now_s)]
        joined = [each for each in left if each not in self._running]
        self._running = [each for each in self._running if each.end_s < 0] + joined
        self._begin()


def replay(
    traffic: Sequence[TraceRequest],
    timing: TimingModel,
    decode_blocks: int,
    context_blocks: int = 0,
) -> tuple[list[Replayed], float]:
    """Return the requests with their times, and the largest share of the pool of the engine that
    decodes that was held. Without `context_blocks` it is vLLM's. Raises RuntimeError if a request
    never ends: it does not fit into the pool, or this is a bug."""
    timeline = EventQueue()
    system = (
        DistServeEngines(timeline, timing, context_blocks, decode_blocks)
        if context_blocks
        else VllmEngine(timeline, timing, decode_blocks)
    )
    requests = [Replayed(each) for each in traffic]
    for each in requests:
        asked = each.request
        submitted_s = asked.arrived_s + timing.host_s(asked.prompt_tokens)
        timeline.at(submitted_s, partial(system.submit, each))
    while timeline.step():
        pass
    if waiting := sum(each.end_s < 0 for each in requests):
        raise RuntimeError(f"{waiting} of {len(requests)} requests never end")
    return requests, system.most_held
