"""The systems that made the A100 logs: which logs are of one deployment, its pools, predictions.

    half of the rates ─▶ a timing model, fitted to their requests
    the other half    ─▶ simulated with it, under that system's own scheduler ─▶ errors of the means

Baton's schedulers cannot be compared with these logs: they keep room for tokens to come and divide
prompts, so where KV is short, one has the wait in the TTFT and the other between tokens. What is
held against the logs is the timing model, its fit and virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import log as logarithm
from pathlib import Path
from statistics import mean

from baton.planner.timing_model import ChunkTiming, HostTiming, TimingModel
from benchmarks.simulator.measured_logs import (
    WARM_UP,
    RateLog,
    fit_logs,
    read_log,
)
from benchmarks.simulator.other_schedulers import BLOCK_TOKENS, replay

KV_BYTES = 819_200.0  # of a token of OPT-13B in 16 bits
WEIGHT_BYTES = 25.7e9
GPU_BYTES = 85.0e9  # of an A100 with 80 GB, as a process sees it
POOL_SHARE = 0.92 - 0.01  # of the memory, for weights and pool: DistServe's flag and reserve
OWN_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, slots=True)
class LoggedSystem:
    """One deployment. `files` are the patterns of its logs; `decode_gpus` share the engine that
    decodes, `context_gpus` the one that computes prompts (0: the same)."""

    name: str
    files: tuple[str, ...]
    decode_gpus: int = 1
    context_gpus: int = 0

    @property
    def together(self) -> bool:
        return not self.context_gpus


# c21d11: the context engine on two GPUs, the decode engine on one; c21d12: on two, as a pipeline.
# The logs without a layout in their name are of more than one: those at 1.5, 3 and 6 requests a
# second have c21d11's step times, and waits above one GPU's pool; at 8 requests a second 98,000
# tokens decode without a wait, which one GPU does not hold, and steps are quicker than c21d12's.
SYSTEMS = (
    LoggedSystem(
        "distserve_c21d11",
        ("distserve-c21d11-*", "distserve-100-1.5", "distserve-300-3", "distserve-600-6"),
        1, 2,
    ),
    LoggedSystem("distserve_c21d12", ("distserve-c21d12-*",), 2, 2),
    LoggedSystem("distserve_two_decode", ("distserve-400-4", "distserve-800-8"), 2, 2),
    LoggedSystem("vllm", ("vllm-*",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Means:
    """Mean TTFT, time between tokens, and time to the last token, in seconds."""

    ttft_s: float
    tpot_s: float
    e2e_s: float

    def errors(self, measured: Means) -> Means:
        """Return the relative differences, with their sign."""
        return Means(
            self.ttft_s / measured.ttft_s - 1,
            self.tpot_s / measured.tpot_s - 1,
            self.e2e_s / measured.e2e_s - 1,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """One log, and what was simulated of it by a fit of other rates."""

    system: str
    rate: float
    count: int
    measured: Means
    simulated: Means
    most_held: float  # share of the pool of the engine that decodes, simulated

    @property
    def errors(self) -> Means:
        """Return the relative errors of the means, with their sign."""
        return self.simulated.errors(self.measured)

    @property
    def error(self) -> float:
        """Return the larger error of the means of TTFT and time between tokens."""
        return max(abs(self.errors.ttft_s), abs(self.errors.tpot_s))


def logs_of(folder: Path, system: LoggedSystem) -> list[RateLog]:
    """Return the logs of a deployment, the lowest rate first, then the shorter. Raises ValueError
    if there are logs of fewer than two rates."""
    paths = {path for pattern in system.files for path in folder.glob(f"{pattern}.exp")}
    logs = [read_log(path) for path in paths]
    if len({each.rate for each in logs}) < 2:
        raise ValueError(f"{folder} has {len(logs)} logs of {system.name}: two rates are needed")
    return sorted(logs, key=lambda each: (each.rate, len(each.requests)))


def halves(logs: Sequence[RateLog]) -> tuple[list[RateLog], list[RateLog]]:
    """Return the logs of every other rate, from the lowest one on, and those of the others."""
    rates = [list(found) for _, found in groupby(logs, key=lambda each: each.rate)]
    return (
        [log for found in rates[::2] for log in found],
        [log for found in rates[1::2] for log in found],
    )


def predictions(
    system: LoggedSystem, known: Sequence[RateLog], asked: Sequence[RateLog]
) -> list[Prediction]:
    """Fit the known logs, and simulate the others."""
    engine = _Engine(system, known)
    pool_tokens = engine.decode_blocks * BLOCK_TOKENS
    timing = fit_logs(system.name, KV_BYTES, known, pool_tokens, together=system.together)
    timing = engine.with_own_time(timing, known)
    found = []
    for log in asked:
        simulated, held = engine.simulated(timing, log)
        count = len(log.requests)
        found.append(Prediction(system.name, log.rate, count, logged(log), simulated, held))
    return found


def logged(log: RateLog) -> Means:
    """Return the measured means of a log, without its warm-up."""
    kept = log.requests[int(WARM_UP * len(log.requests)) :]
    return Means(
        mean(each.ttft_s for each in kept),
        mean(each.mean_gap_s for each in kept if each.output_tokens > 1),
        mean(each.end_s - each.issued_s for each in kept),
    )


class _Engine:
    """A deployment with its pools. vLLM's pool is what its known logs held at most: what else its
    memory was used for is unknown."""

    def __init__(self, system: LoggedSystem, known: Sequence[RateLog]) -> None:
        most = max(each.most_tokens() for each in known)
        self.context_blocks = _pool_blocks(system.context_gpus)
        self.decode_blocks = (
            most // BLOCK_TOKENS if system.together else _pool_blocks(system.decode_gpus)
        )
        self._together = system.together

    def simulated(self, timing: TimingModel, log: RateLog) -> tuple[Means, float]:
        """Return the simulated means of a log, without its warm-up, and the share of the pool that
        was held."""
        done, held = replay(log.traffic(), timing, self.decode_blocks, self.context_blocks)
        kept = done[int(WARM_UP * len(done)) :]
        means = Means(
            mean(each.ttft_s for each in kept),
            mean(each.mean_gap_s for each in kept if each.made > 1),
            mean(each.end_s - each.request.arrived_s for each in kept),
        )
        return means, held

    def with_own_time(self, timing: TimingModel, known: Sequence[RateLog]) -> TimingModel:
        """Return the fit with the part of a prompt's fixed time that is the request's own, and
        holds up no other one. A prompt alone does not show it, queues do: it is the share with
        which the simulated TTFTs of the known logs are nearest to the measured ones."""
        if self._together:
            return timing

        def distance(model: TimingModel) -> float:
            pairs = [(self.simulated(model, log)[0].ttft_s, logged(log).ttft_s) for log in known]
            return sum(logarithm(made / real) ** 2 for made, real in pairs)

        fixed_s = timing.chunk.fixed_s
        models = [
            replace(
                timing,
                chunk=ChunkTiming((1 - share) * fixed_s, timing.chunk.per_token_s),
                host=HostTiming(share * fixed_s),
            )
            for share in OWN_SHARES
        ]
        return min(models, key=distance)


def _pool_blocks(gpus: int) -> int:
    free = gpus * POOL_SHARE * GPU_BYTES - WEIGHT_BYTES
    return max(0, int(free / (KV_BYTES * BLOCK_TOKENS)))
