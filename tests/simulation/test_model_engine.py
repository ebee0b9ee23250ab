"""The lab on a real model: the same promises hold, and wrong KV is wrong words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from baton.engine.batch import Draw, Slice, StepBatch
from baton.models.embedded import embedded_model
from baton.runtime import logs
from baton.runtime.sampling import SamplingParams
from baton.simulation import fault_report, lab, mutations, virtual_loop
from baton.simulation.engine_kind import HASHES
from baton.simulation.model_engine import ModelKind
from baton.simulation.scenario import BLOCK, draw

SEEDS = 6  # a hundred times as slow as hashes
CAUGHT_BY = 7  # of skip-checksums
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("lab", "critical")
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def kind() -> ModelKind:
    return ModelKind(embedded_model(), BLOCK)


def test_no_seed_breaks_a_promise(kind: ModelKind) -> None:
    report = fault_report.run(0, SEEDS, past=False, kind=kind)
    assert report.violations == [] and report.failing_seeds == []
    assert report.seeds == SEEDS and report.ends["finished"] > 2 * SEEDS


def test_a_seed_is_the_same_run_with_the_same_runners_again(kind: ModelKind) -> None:
    traces: list[list[str]] = [[], []]
    outcomes = [lab.run(draw(3), trace=trace, kind=kind) for trace in traces]
    assert outcomes[0] == outcomes[1] and traces[0] == traces[1]


def test_wrong_kv_that_nobody_verifies_changes_tokens(kind: ModelKind) -> None:
    broken = mutations.named("skip-checksums")
    outcome = lab.run(draw(CAUGHT_BY), broken, kind=kind)
    assert any("tokens" in breach for breach in outcome.breaches)
    assert lab.run(draw(CAUGHT_BY), kind=kind).breaches == []


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
    (want, *_) = kind.drawn(prompt, 3, GREEDY, 0)
    assert len(kind.drawn(prompt, 3, GREEDY, 0)) == 3

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


def test_the_line_that_repeats_a_seed_names_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    folder = embedded_model()
    name = "lose-tickets"
    assert fault_report.faults(0, 1, mutation=name, keep=[0, 1, 2, 3], model=folder) == 0
    assert f"--engine model --mutation {name}" in capsys.readouterr().out
