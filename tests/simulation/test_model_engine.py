"""The lab on a real model: the same promises hold, and wrong KV is wrong words."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.context import Context

from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.models.embedded import embedded_model
from baton.models.random_model import make_shaped_model
from baton.proto import worker_pb2
from baton.router.dispatch.active_request import OutputToken
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.config import Config, PoolConfig
from baton.runtime.sampling import SamplingParams
from baton.simulation import fault_report, lab
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.engine_kind import HASHES
from baton.simulation.fleet.model_engine import ModelKind
from baton.simulation.fleet.scenario import BLOCK
from baton.simulation.fleet.world import World
from baton.simulation.mutations import mutations
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = 6  # a hundred times as slow as hashes
CAUGHT_BY = 7  # of skip-checksums
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def kind() -> ModelKind:
    return ModelKind(embedded_model(), BLOCK)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, a fifth as costly as the embedded one."""
    return make_shaped_model(
        tmp_path_factory.mktemp("small"),
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=96,
        vocab=3712,
        dtype="bfloat16",
        seed=1,
        context=512,
    )


@pytest.fixture(scope="module")
def small_kind(small_model: Path) -> ModelKind:
    return ModelKind(small_model, BLOCK)


def test_a_seed_breaks_no_promise(small_kind: ModelKind) -> None:
    report = fault_report.run(0, 1, past=False, kind=small_kind)
    assert report.violations == [] and report.failing_seeds == []
    assert report.seeds == 1 and report.ends["finished"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_no_seed_breaks_a_promise(kind: ModelKind) -> None:
    report = fault_report.run(0, SEEDS, past=False, kind=kind)
    assert report.violations == [] and report.failing_seeds == []
    assert report.seeds == SEEDS and report.ends["finished"] > 2 * SEEDS


@pytest.mark.nightly
def test_a_seed_is_the_same_run_with_the_same_runners_again(small_kind: ModelKind) -> None:
    traces: list[list[str]] = [[], []]
    outcomes = [lab.run(draw(3), trace=trace, kind=small_kind) for trace in traces]
    assert outcomes[0] == outcomes[1] and traces[0] == traces[1]


# tests/stories/test_flipped_bit.py has wrong KV under a real model, test_mutations.py this mutation
@pytest.mark.nightly
def test_unverified_wrong_kv_changes_tokens(kind: ModelKind) -> None:
    broken = mutations.named("skip-checksums")
    outcome = lab.run(draw(CAUGHT_BY), broken, kind=kind)
    assert any("tokens" in breach for breach in outcome.breaches)
    assert lab.run(draw(CAUGHT_BY), kind=kind).breaches == []


@pytest.mark.nightly
def test_reads_are_of_as_many_blocks_whatever_their_size(kind: ModelKind) -> None:
    assert kind.block_bytes(BLOCK) > HASHES.block_bytes(BLOCK)
    for seed in range(8):
        scenario = draw(seed)
        small = scenario.config.handoff.read_bytes
        large = scenario.computed_by(kind).config.handoff.read_bytes
        assert large // kind.block_bytes(BLOCK) == small // HASHES.block_bytes(BLOCK) in (1, 3)
        assert scenario.computed_by(HASHES) == scenario


def test_what_a_run_without_faults_draws_is_what_an_engine_draws(kind: ModelKind) -> None:
    prompt = tuple(range(5, 16))
    (want, *_) = kind.drawn(prompt, 3, GREEDY, 0, "")
    assert len(kind.drawn(prompt, 3, GREEDY, 0, "")) == 3

    async def main() -> int:
        engine, pool = kind.make(24, BLOCK, lambda batch: 0.01)
        assert not pool.any()
        first = StepBatch((Slice(prompt[:8], 0, [4, 2]),))
        last = StepBatch((Slice(prompt[8:], 8, [4, 2, 7], (Draw(0, 11, GREEDY),)),))
        engine.submit(first)
        drawn = (await engine.submit(last).result()).drawn[0][0]
        assert pool[[2, 4, 7]].any() and not pool[[0, 1, 3]].any()
        return drawn.token

    assert virtual_loop.run(main()) == want.token
    kind.begin()


@pytest.mark.nightly
def test_the_line_that_repeats_a_seed_names_the_engine(
    small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "lose-tickets"
    assert fault_report.faults(0, 1, mutation=name, keep=[0, 1, 2, 3], model=small_model) == 0
    assert f"--engine model --mutation {name}" in capsys.readouterr().out


def test_three_deaths_in_a_row_change_no_token_and_no_logprob(small_kind: ModelKind) -> None:
    """Two choices, each under all penalties: those look at prompt and output apart, so they tell
    a boundary that moved with the request."""
    prompt, count = tuple(range(5, 30)), 40
    params = SamplingParams(
        temperature=0.9,
        repetition_penalty=1.2,
        frequency_penalty=1.4,
        presence_penalty=1.3,
        seed=7,
        top_logprobs=2,
    )
    kind, outputs = small_kind, list[OutputToken]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(loop, Config(pool=PoolConfig(block_size=BLOCK)), random.Random(1), kind)
        for number in range(6):
            world.start_worker(f"d{number}", "decode", blocks=40)
        router = world.start_router("r0")

        async def ask() -> None:
            until_s = asyncio.get_running_loop().time() + 60
            active_request = await router.dispatcher.start(
                ValidatedRequest(prompt, sampling_of(params), count, choices=2),
                "r",
                Context(),
                until_s,
            )
            while fresh := await active_request.next():
                outputs.extend(fresh)

        asking = router.machine.spawn(ask(), "ask")
        for there, attempt in ((5, 1), (10, 2), (15, 3)):
            while min(len(tokens_of(outputs, choice)) for choice in (0, 1)) < there:
                await asyncio.sleep(0.001)
            bearing = list(router.dispatcher.attempts.values())
            assert {submission.attempt for submission in bearing} == {attempt}
            for name in {sub.link.worker_id for sub in bearing if sub.link is not None}:
                world.kill(name, silent=False)
        await asking

    virtual_loop.run(main())
    for choice in (0, 1):
        want = kind.drawn(prompt, count, params, choice, "")
        got = [each for each in outputs if each.choice == choice and each.token is not None]
        assert [(each.token, each.logprob, each.top) for each in got] == [
            (one.token, one.logprob, one.top) for one in want
        ]
    mild = replace(params, frequency_penalty=0.0, presence_penalty=0.0)
    assert any(  # the penalties are felt, whatever the model says
        tokens_of(outputs, choice)
        != [one.token for one in kind.drawn(prompt, count, mild, choice, "")]
        for choice in (0, 1)
    )
    assert [each.finish for each in outputs if each.finish] == ["length", "length"]


def sampling_of(params: SamplingParams) -> worker_pb2.Sampling:
    return worker_pb2.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        seed=params.seed,
        top_logprobs=params.top_logprobs,
    )


def tokens_of(outputs: list[OutputToken], choice: int) -> list[int]:
    return [each.token for each in outputs if each.choice == choice and each.token is not None]
