"""How much of the machine the engine uses on a CPU.

    python -m benchmarks.engine_cpu [--rounds N] [--threads N] [--quick] [--json FILE]
                                    [--openvino PYTHON] [--vllm PYTHON]

One process, 2 threads, a random Qwen3-shaped bf16 model of 0.45 B parameters (28 layers, hidden
1024, 16/8 heads of 128, FFN 3072, vocabulary 8192); steps go through the engine's step runner,
checks and greedy draws included. A round runs everything once, the machine's own ceilings
between the steps they are read against; figures are medians over rounds of a round's ratios.

bf16_linear_gflops    torch's linear, bf16 (float32 where the processor has nothing for bf16), the
                      faster of two large shapes (`benchmarks.figures.ceilings`)
cold_read_gb_per_s    summing 512 MiB, which no cache holds
prefill_mfu_1024      operations of a prompt of 1,024 tokens in one step (two per weight and
                      token, the head for one token, attention's causal half) over its time, over
                      the linear rate
decode_mbu_bs1        bytes of weights (matrices and head) and of KV that a step must read, one
                      sequence with 512 tokens of context, over its time, over the cold read rate
decode_mbu_bs32_ctx512
                      the same for 32 sequences with 512 tokens each
decode_step_ratio_bs32_ctx16
                      step of 32 sequences over step of one, 16 tokens of context each
decode_step_ratio_bound
                      the same of the two steps at this machine's ceilings in the same round: each
                      weight read at the cold read rate or multiplied by all rows at the linear
                      rate, whichever takes longer, and the KV read (`least_step_s`)
host_us_per_step_256  what a decode step of 256 sequences (each after 512 tokens, greedy) costs
                      outside the model's own math: the decode scheduler's plan, the step's checks,
                      arrays and set-up of draws (`runner.prepare`), the scheduler's commit, each
                      token appended to its sequence (`benchmarks.figures.host_side`)
deterministic_cost    step of 8 sequences with 512 tokens each under the `deterministic` setting,
                      over the same step without it; no limit, and left out with a note where this
                      machine refuses the setting
prefill_vs_*, decode_bs1_vs_*, decode_bs32_vs_*
                      a peer's time over ours for the same work, in turns within a round, if the
                      interpreter of its environment is given (benchmarks/peers/README.md); a peer's
                      scheduler is in its time, ours (see host_us_per_step_256) is not in ours

Of a few calls of one kind in a row the fastest counts, for steps and ceilings alike: a neighbour's
moment is no property of either. The threads of an idle OpenMP team spin for some ten
microseconds before they sleep, as `baton serve` lets them where each has a core; the program
starts itself again with that environment. `decode_mbu_*_typical` take the median of the calls.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.deploy.serve.plan import SHORT_SPIN
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch, StepResult
from baton.engine.spec.model_spec import ModelSpec
from baton.models.embedded import embedded_model
from baton.runtime.errors import ConfigError
from baton.runtime.sampling import SamplingParams
from benchmarks.figures.ceilings import Ceilings, matrix_unit
from benchmarks.figures.host_side import HostSide
from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.inputs.cached_model import cached_model
from benchmarks.peers import engines as peer_engines
from benchmarks.peers.engines import Peer

PROMPT_TOKENS = 1024
CONTEXT_TOKENS = 512
SHORT_TOKENS = 16
BATCH = 32
STRICT_BATCH = 8
COMPARED, COMPARED_TOKENS = 8, 64  # prompts whose first token a peer should draw too
HOST_BATCH = 256
BLOCK_TOKENS = 16
ROUNDS = 7
STEPS = 5  # of one kind in a row
WARM_UPS = 1
SPIN = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": SHORT_SPIN}
GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class EngineTimes:
    """One entry a round."""

    linear: list[float] = field(default_factory=list)  # operations a second
    read: list[float] = field(default_factory=list)  # bytes a second
    prefill: list[float] = field(default_factory=list)  # seconds, as the next four
    one: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)
    one_short: list[float] = field(default_factory=list)
    many_short: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)  # of many_short / one_short
    mfu: list[float] = field(default_factory=list)
    mbu_one: list[float] = field(default_factory=list)
    mbu_many: list[float] = field(default_factory=list)
    typical_one: list[float] = field(default_factory=list)
    typical_many: list[float] = field(default_factory=list)
    strict: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)  # seconds, as the next two
    prepare: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)


class EngineBench:
    """One runner, its steps, the ceilings and the peers; `peers` are the caller's to close."""

    def __init__(self, folder: Path, peers: Sequence[Peer]) -> None:
        blocks = BATCH * (CONTEXT_TOKENS // BLOCK_TOKENS + 1)
        self._runner = build_runner(
            folder, EngineOptions(blocks=blocks, block_size=BLOCK_TOKENS, dtype="bfloat16")
        )
        few = blocks * STRICT_BATCH // BATCH
        self._strict, self.notes = deterministic_runner(folder, few)
        self.spec = self._runner.spec
        self._runner.pool.tensor.normal_()
        self._order = random.Random(0).sample(range(blocks), blocks)
        self._strict_order = random.Random(1).sample(range(few), few)
        self._ceilings = Ceilings()
        self._host = HostSide(HOST_BATCH)
        self._peers = peers
        self.rounds = EngineTimes()

    def run(self, rounds: int) -> None:
        # A peer's batch grows by a token a step: on average it has CONTEXT_TOKENS when measured.
        ahead = STEPS * WARM_UPS + STEPS * rounds // 2
        prompts = [self._tokens(COMPARED_TOKENS) for _ in range(COMPARED)]
        first = [self._timed(self._prompt(tokens))[1].drawn[0][0].token for tokens in prompts]
        for peer in self._peers:
            peer.compare(prompts, first)
            peer.hold_batch([self._tokens(CONTEXT_TOKENS - ahead) for _ in range(BATCH)])
        for number in range(-WARM_UPS, rounds):
            found = self.rounds if number >= 0 else EngineTimes()
            if number == 0:
                for peer in self._peers:
                    peer.forget()
            self._prefill(found)
            self._decode(found)
            self._host_side(found)
            self._deterministic(found)

    def _prefill(self, found: EngineTimes) -> None:
        rates = [self._ceilings.linear_flops()]
        prompts = [self._tokens(PROMPT_TOKENS) for _ in range(2)]
        found.prefill.append(min(self._step(self._prompt(tokens)) for tokens in prompts))
        rates.append(self._ceilings.linear_flops())
        for peer in self._peers:
            peer.prefill(prompts, found.prefill[-1])
        found.linear.append(max(rates))
        flops = prefill_flops(self.spec, PROMPT_TOKENS)
        found.mfu.append(flops / found.prefill[-1] / found.linear[-1])

    def _decode(self, found: EngineTimes) -> None:
        rates = [self._ceilings.read_bytes_s()]
        found.one.append(min(one := self._steps(1, CONTEXT_TOKENS)))
        rates.append(self._ceilings.read_bytes_s())
        found.many.append(min(many := self._steps(BATCH, CONTEXT_TOKENS)))
        rates.append(self._ceilings.read_bytes_s())
        for peer in self._peers:
            peer.decode_one(self._tokens(CONTEXT_TOKENS), STEPS, found.one[-1])
            peer.decode_batch(STEPS, found.many[-1])
        found.one_short.append(min(self._steps(1, SHORT_TOKENS)))
        found.many_short.append(min(self._steps(BATCH, SHORT_TOKENS)))
        found.read.append(statistics.median(rates))
        rates_now = found.linear[-1], found.read[-1]
        most, least = (least_step_s(self.spec, n, SHORT_TOKENS + 1, *rates_now) for n in (BATCH, 1))
        found.bound.append(most / least)
        of_one, of_many = (decode_bytes(self.spec, n, CONTEXT_TOKENS + 1) for n in (1, BATCH))
        before, after = statistics.mean(rates[:2]), statistics.mean(rates[1:])
        found.mbu_one.append(of_one / min(one) / before)
        found.mbu_many.append(of_many / min(many) / after)
        found.typical_one.append(of_one / statistics.median(one) / before)
        found.typical_many.append(of_many / statistics.median(many) / after)

    def _host_side(self, found: EngineTimes) -> None:
        best = min((self._host.step() for _ in range(STEPS)), key=lambda each: each.total_s)
        found.plan.append(best.plan_s)
        found.prepare.append(best.prepare_s)
        found.commit.append(best.commit_s)

    def _deterministic(self, found: EngineTimes) -> None:
        if self._strict is None:
            return
        batch = self._sequences(STRICT_BATCH, CONTEXT_TOKENS, self._strict_order)
        free, strict = [], []
        for _ in range(STEPS):
            free.append(self._step(batch))
            strict.append(self._step(batch, self._strict))
        found.strict.append(min(strict) / min(free))

    def _steps(self, sequences: int, context: int) -> list[float]:
        batch = self._sequences(sequences, context)
        return [self._step(batch) for _ in range(STEPS)]

    def _step(self, batch: StepBatch, runner: ModelRunner | None = None) -> float:
        return self._timed(batch, runner)[0]

    def _timed(
        self, batch: StepBatch, runner: ModelRunner | None = None
    ) -> tuple[float, StepResult]:
        start = time.perf_counter()
        result = (runner or self._runner).run(batch)
        took = time.perf_counter() - start
        assert not result.broken
        return took, result

    def _tokens(self, count: int) -> list[int]:
        return random.choices(range(self.spec.vocab_size), k=count)

    def _prompt(self, tokens: list[int]) -> StepBatch:
        blocks = self._order[: len(tokens) // BLOCK_TOKENS]
        return StepBatch((Slice(tokens, 0, blocks, (Draw(0, len(tokens), GREEDY),)),))

    def _sequences(self, count: int, context: int, order: Sequence[int] | None = None) -> StepBatch:
        each, order = context // BLOCK_TOKENS + 1, order or self._order
        draws = (Draw(0, context + 1, GREEDY),)
        return StepBatch(
            tuple(
                Slice([number], context, order[number * each : (number + 1) * each], draws)
                for number in range(count)
            )
        )


def deterministic_runner(folder: Path, blocks: int) -> tuple[ModelRunner | None, list[str]]:
    """The runner whose cost is measured, its pool filled. Where this machine refuses the mode,
    None and a note that says why: the other figures do not need it."""
    try:
        made = build_runner(
            folder,
            EngineOptions(
                blocks=blocks, block_size=BLOCK_TOKENS, dtype="bfloat16", deterministic=True
            ),
        )
    except ConfigError as error:
        return None, [f"deterministic_cost left out: {error}"]
    made.pool.tensor.normal_()
    return made, []


def matrix_elements(spec: ModelSpec) -> int:
    """Weights of all layers' matrices, without the head."""
    attention = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim * spec.hidden_size
    return spec.layers * (attention + 3 * spec.ffn_size * spec.hidden_size)


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    pairs = tokens * (tokens + 1) / 2
    attention = 4.0 * pairs * spec.heads * spec.head_dim * spec.layers
    head = 2.0 * spec.vocab_size * spec.hidden_size
    return 2.0 * matrix_elements(spec) * tokens + attention + head


def decode_bytes(spec: ModelSpec, sequences: int, tokens: int) -> float:
    weights = 2.0 * (matrix_elements(spec) + spec.vocab_size * spec.hidden_size)
    kv = 2.0 * 2 * spec.layers * spec.kv_heads * spec.head_dim * tokens
    return weights + sequences * kv


def least_step_s(
    spec: ModelSpec, sequences: int, tokens: int, flops_s: float, bytes_s: float
) -> float:
    """Return the least time of a decode step at these ceilings: only products and reads of weights
    and KV."""
    weights = matrix_elements(spec) + spec.vocab_size * spec.hidden_size
    kv = decode_bytes(spec, sequences, tokens) - 2.0 * weights
    return weights * max(2.0 / bytes_s, 2.0 * sequences / flops_s) + kv / bytes_s


def figures(rounds: EngineTimes, threads: int) -> list[Figure]:
    """The five of the module's head, then what they are made of."""
    ratios = [m / o for m, o in zip(rounds.many_short, rounds.one_short, strict=True)]
    parts = (rounds.plan, rounds.prepare, rounds.commit)
    host = [sum(each) * 1e6 for each in zip(*parts, strict=True)]
    made = [
        at_least("prefill_mfu_1024", statistics.median(rounds.mfu), 0.55),
        at_least("decode_mbu_bs1", statistics.median(rounds.mbu_one), 0.85),
        at_least("decode_mbu_bs32_ctx512", statistics.median(rounds.mbu_many), 0.6),
        at_most("decode_step_ratio_bs32_ctx16", statistics.median(ratios), 1.35),
        at_most("host_us_per_step_256", statistics.median(host), 1500.0, "us"),
        Figure(
            "decode_step_ratio_bound", statistics.median(rounds.bound), "", _spread(rounds.bound)
        ),
        Figure("decode_mbu_bs1_typical", statistics.median(rounds.typical_one)),
        Figure("decode_mbu_bs32_ctx512_typical", statistics.median(rounds.typical_many)),
        _rate("bf16_linear_gflops", rounds.linear, "GF/s", matrix_unit()),
        _rate("cold_read_gb_per_s", rounds.read, "GB/s"),
        _rate("prefill_tokens_s", [PROMPT_TOKENS / s * 1e9 for s in rounds.prefill], "/s"),
        _rate("decode_tokens_s_bs32", [BATCH / s * 1e9 for s in rounds.many], "/s"),
    ]
    if rounds.strict:
        cost = statistics.median(rounds.strict)
        made.append(Figure("deterministic_cost", cost, "", _spread(rounds.strict)))
    for name in ("one", "many", "one_short", "many_short"):
        values = [value * 1e3 for value in getattr(rounds, name)]
        made.append(Figure(f"step_ms_{name}", statistics.median(values), "ms", _spread(values)))
    for name in ("plan", "prepare", "commit"):
        values = [value * 1e6 for value in getattr(rounds, name)]
        made.append(Figure(f"host_{name}_us", statistics.median(values), "us", _spread(values)))
    return [*made, Figure("rounds", len(rounds.mfu)), Figure("threads", threads)]


def _rate(name: str, values: Sequence[float], unit: str, beside: str = "") -> Figure:
    scaled = [value / 1e9 for value in values]
    return Figure(name, statistics.median(scaled), unit, f"{_spread(scaled)} {beside}".strip())


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if any(os.environ.get(name) != value for name, value in SPIN.items()):
        again = [sys.executable, "-m", "benchmarks.engine_cpu", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, again, os.environ | SPIN)
    torch.set_num_threads(options.threads)
    folder = embedded_model() if options.quick else cached_model()
    pythons = {"openvino": options.openvino, "vllm": options.vllm}
    peers: list[Peer] = []
    try:
        for name, python in pythons.items():
            if python is not None:
                peers.append(peer_engines.start(python, name, folder, options.threads))
        bench = EngineBench(folder, peers)
        bench.run(options.rounds)
    finally:
        for peer in peers:
            peer.close()
    found = figures(bench.rounds, options.threads)
    found += [each for peer in peers for each in peer_engines.figures(peer)]
    report(found, options.json, [*bench.notes, *peer_engines.notes(peers)])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("How much of the machine the engine uses on a CPU")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--quick", action="store_true", help="the small embedded model instead")
    for name in peer_engines.LIMITS:
        made.add_argument(
            f"--{name}", type=Path, metavar="PYTHON", help=f"of {name}'s own environment"
        )
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
