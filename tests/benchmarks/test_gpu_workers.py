"""The part of `make gpu` that starts workers: what it takes for proof, and what it does not."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from baton.deploy.host import packages
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.scheduling.batch import Draw, SamplingParams, Slice, StepBatch
from baton.runtime import metrics
from benchmarks.gpu_parts import small_model as gpu_small_model
from benchmarks.gpu_parts import workers

WANTED = [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("found", "handoffs", "says"),
    [
        ([[1, 2, 3], [4, 5, 7]], 2, "1 of 2 answers equal one process's, 2 came by a handoff"),
        (WANTED, 1, "2 of 2 answers equal one process's, 1 came by a handoff"),
        ([[], []], 0, "0 of 2 answers"),
    ],
)
def test_other_tokens_and_answers_without_a_handoff_fail(monkeypatch, found, handoffs, says):
    async def asked(pair, prompts):
        return found, handoffs

    monkeypatch.setattr(workers, "_asked", asked)
    with pytest.raises(RuntimeError, match=f"a pair: {says}"):
        workers._figure("a pair", None, [[1], [2]], WANTED)


def test_equal_answers_by_handoffs_are_a_figure_that_holds(monkeypatch):
    async def asked(pair, prompts):
        return [list(each) for each in WANTED], 2

    monkeypatch.setattr(workers, "_asked", asked)
    figure = workers._figure("a_pair", None, [[1], [2]], WANTED)
    assert (figure.name, figure.value, figure.holds) == ("answers_equal_a_pair", 2.0, True)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("No module named 'orjson'"), "orjson"),
        (RuntimeError("The grpc package installed is at version 1.70"), "1.70"),
    ],
)
def test_packages_missing_on_workers_are_named(monkeypatch, error, says):
    class Failing:
        def find_spec(self, name, path, target=None):
            if name == "benchmarks.fleets.worker_pair":
                raise error

    workers.check_packages()
    monkeypatch.delitem(sys.modules, "benchmarks.fleets.worker_pair")
    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    with pytest.raises(workers.Skipped, match=says):
        next(iter(workers.workers(None)))


def test_workers_without_nixl_are_skipped(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda module: "nixl" not in module)
    with pytest.raises(workers.Skipped, match="workers need nixl"):
        next(iter(workers.workers(None)))


def test_handoffs_are_counted_from_the_workers_own_metrics():
    """The text is what `runtime.metrics` writes."""
    before = metrics.HANDOFFS.labels("completed")._value.get()
    metrics.HANDOFFS.labels("completed").inc(3)

    class Admin(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(metrics.render())

        def log_message(self, *_):
            return

    with HTTPServer(("127.0.0.1", 0), Admin) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert workers._completed(f"127.0.0.1:{server.server_port}") == int(before) + 3


async def test_one_process_answers_greedily_by_its_own_runner(tmp_path):
    model = tmp_path / "model"
    gpu_small_model.write_small_model(model, True)
    prompts = [[5, 9, 100, 7] * 5, [3]]
    found = await workers._alone(model, "cpu", prompts)
    runner = build_runner(model, EngineOptions(blocks=8))
    for prompt, answer in zip(prompts, found, strict=True):
        assert len(answer) == workers.OUTPUT_TOKENS
        whole = [*prompt, *answer]
        (logits,) = runner.all_logits(StepBatch((Slice(whole, 0, range(4)),)))
        again = logits.argmax(dim=-1).tolist()
        assert again[len(prompt) - 1 : -1] == answer
        draw = Draw(0, len(prompt), SamplingParams(temperature=0.0))
        first = runner.run(StepBatch((Slice(prompt, 0, range(4), (draw,)),)))
        assert first.drawn[0][0].token == answer[0]
