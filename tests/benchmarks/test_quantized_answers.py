"""The benchmark of quantised answers: it asks the package's model, and counts rightly."""

from __future__ import annotations

import pytest

from tests.support.benchmark_runs import Measure


def test_it_writes_its_figures(measured: Measure) -> None:
    _, figures, _ = measured("quantized_answers")
    assert figures.keys() == {
        "exact_bf16",
        "exact_int4",
        "changed_int4",
        "changed_unsure_int4",
        "answers",
    }
    assert figures["answers"]["value"] == 8
    assert figures["exact_bf16"]["value"] > 0.5


def test_changed_answers_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.models.evaluation.scoring import Asked
    from benchmarks.quantized_answers import Said, figures

    asked = [Asked("sum", (1, 2), (3, 4)) for _ in range(4)]
    unsure = [[7], [8], [9], [7]]
    said = {
        "bf16": Said([[3, 4], [3, 4], [3, 5], [6]], unsure),
        "int8": Said([[3, 4], [3, 4, 9], [3, 4], [6]], [*unsure[:3], [7, 7]]),
    }
    found = {figure.name: figure.value for figure in figures(asked, said)}
    expected = {"exact_bf16": 0.5, "exact_int8": 0.5, "changed_int8": 0.5}
    assert found == {**expected, "changed_unsure_int8": 0.25, "answers": 4}


def test_the_last_question_alone_is_shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.quantized_answers import shuffled_question

    prompt = (90, 1, 2, 3, 91, 5, 91, 90, *range(10, 30), 91, 7)
    found = shuffled_question(prompt, user=90, end=91, seed=1)
    assert found[:8] == prompt[:8] and found[28:] == prompt[28:]
    assert sorted(found) == sorted(prompt) and found != prompt
