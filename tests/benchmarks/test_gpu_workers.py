"""The part of `make gpu` that starts workers: what it takes for proof, and what it does not."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.deploy.host import packages
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime import handoff_metrics, metrics
from baton.runtime.sampling import SamplingParams
from benchmarks.gpu_parts import one_process, workers
from benchmarks.gpu_parts import small_model as gpu_small_model
from tests.support.metric_values import metric_value

WANTED = [[1, 2, 3], [4, 5, 6]]
ASKS = [one_process.Ask([1], 3), one_process.Ask([2], 3)]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A decode worker gives `found`."""

    def make(found):
        async def asked(pair, worker, asks):
            return found

        monkeypatch.setattr(workers, "_asked", asked)

    return make


@pytest.mark.parametrize(
    ("answers", "handoffs", "says"),
    [
        ([[1, 2, 3], [4, 5, 7]], 2, "1 of 2 answers equal one process's, 2 came by a handoff"),
        (WANTED, 1, "2 of 2 answers equal one process's, 1 came by a handoff"),
        ([[], []], 0, "0 of 2 answers"),
    ],
)
def test_other_tokens_and_answers_without_a_handoff_fail(
    answered: Callable[..., None], answers: list[list[int]], handoffs: int, says: str
) -> None:
    answered(workers.Found(answers, handoffs))
    with pytest.raises(RuntimeError, match=f"a pair: {says}"):
        workers.pair_figure("a pair", None, "decode-0", ASKS, WANTED)


def test_equal_answers_by_handoffs_are_a_figure_that_holds(answered: Callable[..., None]) -> None:
    answered(workers.Found([list(each) for each in WANTED], 2))
    figure = workers.pair_figure("a_pair", None, "decode-0", ASKS, WANTED)
    assert (figure.name, figure.value, figure.holds) == ("answers_equal_a_pair", 2.0, True)


def test_speculation_without_an_accepted_proposal_fails(answered: Callable[..., None]) -> None:
    answered(workers.Found(WANTED, 2, accepted=3, rejected=1))
    figure = workers.pair_figure("speculating", None, "decode-1", ASKS, WANTED)
    assert "3 of 4 proposals accepted" in figure.beside
    answered(workers.Found(WANTED, 2, rejected=4))
    with pytest.raises(RuntimeError, match="no proposal accepted, 4 rejected"):
        workers.pair_figure("speculating", None, "decode-1", ASKS, WANTED)


def audit(**blocks):
    free = dict.fromkeys(("total", "free", "cached", "used", "leased", "pinned", "quarantined"), 0)
    return {"blocks": free | blocks, "requests": 0, "open_handoffs": 0}


def test_a_block_that_stays_held_fails_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    held = audit(used=2) | {"open_handoffs": 1}
    answers = [held, audit(free=9, cached=2)]
    record = SimpleNamespace(worker_id="decode-0", admin_address="here")
    pair = SimpleNamespace(records=lambda: [record])
    monkeypatch.setattr(workers, "_get", lambda *_: json.dumps(answers.pop(0)))
    figure = workers.audited_figure([pair])
    assert (figure.value, answers) == (1.0, [])
    monkeypatch.setattr(workers, "AUDIT_S", 0.0)
    monkeypatch.setattr(workers, "_get", lambda *_: json.dumps(held))
    with pytest.raises(RuntimeError, match=r"'decode-0': \{'used': 2, 'open_handoffs': 1\}"):
        workers.audited_figure([pair])


def test_an_answer_outside_of_its_schema_fails() -> None:
    def tokens(text):
        return [ord(each) - 33 + 3 for each in text] + [gpu_small_model.END]

    asks = [one_process.Ask([1], 40, schema=workers.SCHEMA)]
    workers.check_schema(asks, [tokens('{"a":7,"b":"x","c":true}')])
    for wrong in ('{"a":1000,"b":"x","c":true}', '{"a":7,"b":"x"}'):
        with pytest.raises(RuntimeError, match="does not follow its schema"):
            workers.check_schema(asks, [tokens(wrong)])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("No module named 'orjson'"), "orjson"),
        (RuntimeError("The grpc package installed is at version 1.70"), "1.70"),
    ],
)
def test_packages_missing_on_workers_are_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    class Failing:
        def find_spec(self, name, path, target=None):
            if name == "benchmarks.fleets.worker_pair":
                raise error

    workers.check_packages()
    monkeypatch.delitem(sys.modules, "benchmarks.fleets.worker_pair")
    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    with pytest.raises(workers.Skipped, match=says):
        next(iter(workers.workers(None)))


def test_workers_without_nixl_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda module: "nixl" not in module)
    with pytest.raises(workers.Skipped, match="workers need nixl"):
        next(iter(workers.workers(None)))


def test_handoffs_are_counted_from_the_workers_own_metrics() -> None:
    """The text is what `runtime.metrics` writes."""
    before = metric_value(handoff_metrics.HANDOFFS.labels("completed"))
    handoff_metrics.HANDOFFS.labels("completed").inc(3)

    class Admin(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(metrics.render())

        def log_message(self, *_):
            return

    with HTTPServer(("127.0.0.1", 0), Admin) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert workers.completed_handoffs(f"127.0.0.1:{server.server_port}") == int(before) + 3


async def test_one_process_answers_greedily_by_its_own_runner(tmp_path: Path) -> None:
    model = tmp_path / "model"
    gpu_small_model.write_small_model(model, True)
    asks = [one_process.Ask([5, 9, 100, 7] * 5, 24), one_process.Ask([3], 24)]
    found = await one_process.one_process_answers(model, "cpu", asks)
    runner = build_runner(model, EngineOptions(blocks=8))
    for ask, answer in zip(asks, found, strict=True):
        assert len(answer) == 24
        whole = [*ask.prompt, *answer]
        (logits,) = runner.all_logits(StepBatch((Slice(whole, 0, range(4)),)))
        again = logits.argmax(dim=-1).tolist()
        assert again[len(ask.prompt) - 1 : -1] == answer
        draw = Draw(0, len(ask.prompt), SamplingParams(temperature=0.0))
        first = runner.run(StepBatch((Slice(ask.prompt, 0, range(4), (draw,)),)))
        assert first.drawn[0][0].token == answer[0]


async def test_one_process_draws_by_seed_and_by_schema(tmp_path: Path) -> None:
    model = tmp_path / "model"
    gpu_small_model.write_small_model(model, True)
    prompt = [5, 9, 100, 7] * 5
    asks = [one_process.Ask(prompt, 24, 1.0, seed) for seed in (1, 1, 2)]
    asks += [one_process.Ask(prompt, 40, 1.0, seed, workers.SCHEMA) for seed in (1, 2)]
    one, again, other, *objects = await one_process.one_process_answers(model, "cpu", asks)
    assert one == again != other
    workers.check_schema(asks[3:], objects)
    assert objects[0] != objects[1] and all(answer[-1] == 2 for answer in objects)
