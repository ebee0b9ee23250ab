"""From nothing to two folders, resumed, evaluated, with a curve and cards: all of it, tiny."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton.models.evaluation import evaluate
from baton.models.evaluation.scoring import LIMITS, LONG_RECALL
from baton.models.training import tiny_folder, train
from baton.models.training.tiny_tokenizer import ChatEncoder
from baton.models.training.train import Options
from baton.models.training.training_model import TinyShape, TrainingModel
from baton.runtime.errors import ConfigError
from tests.support.json_values import JsonObject

pytestmark = pytest.mark.nightly


def small(name: str, vocab: int) -> TinyShape:
    hidden = 64 if name == "baton-tiny" else 32
    rows = -(-vocab // 64) * 64
    return TinyShape(1, hidden, heads=2, kv_heads=1, head_dim=32, ffn=48, vocab=rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, float]]]:
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_folder, "shape_of", small)
        patch.setattr(train, "_POINT_STEPS", 2)
        heard: list[tuple[str, float]] = []
        train.train(
            Options(folder, steps=4, batch_tokens=256, half=False),
            lambda name, done, loss: heard.append((name, done)),
        )
    return folder, heard


def test_both_models_a_curve_and_the_state_are_written(
    trained: tuple[Path, list[tuple[str, float]]],
) -> None:
    folder, heard = trained
    for name in ("baton-tiny", "baton-tiny-draft"):
        assert {path.name for path in (folder / name).iterdir()} == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        for stage in ("one", "two"):
            assert [done for reported, done in heard if reported == f"{name}, {stage}"][-1] == 1.0
            assert (folder / "state" / f"stage-{stage}" / name / "state.safetensors").is_file()
    one, other = (
        (folder / name / "tokenizer.json").read_bytes()
        for name in ("baton-tiny", "baton-tiny-draft")
    )
    assert one == other
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_finished_run_is_not_repeated_and_gives_the_same_files(
    trained: tuple[Path, list[tuple[str, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = trained
    monkeypatch.setattr(tiny_folder, "shape_of", small)
    path = folder / "baton-tiny" / "model.safetensors"
    before = path.read_bytes()
    path.unlink()
    train.train(Options(folder, steps=4, batch_tokens=256, half=False), lambda *_: None)
    assert path.read_bytes() == before


def test_stage_two_goes_on_from_the_models_of_a_folder(
    trained: tuple[Path, list[tuple[str, float]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their tokenizer; so does a whole run from the weights of its own stage one."""
    folder, _ = trained
    monkeypatch.setattr(tiny_folder, "shape_of", small)
    options = Options(tmp_path, steps=1, batch_tokens=256, half=False, base=folder)
    heard: list[str] = []
    train.train(options, lambda name, *_: heard.append(name))
    assert heard == ["baton-tiny, two", "baton-tiny-draft, two"]
    for name in ("baton-tiny", "baton-tiny-draft"):
        assert not (tmp_path / "state" / "stage-one").exists()
        one, other = (
            tiny_folder.read_model(where / name).state_dict() for where in (folder, tmp_path)
        )
        apart = max(float((one[key] - other[key]).abs().max()) for key in one)
        assert 0.0 < apart < 0.02  # one warm step away, and not begun again
    assert (tmp_path / "baton-tiny" / "tokenizer.json").read_bytes() == (
        folder / "baton-tiny" / "tokenizer.json"
    ).read_bytes()


def test_a_curve_of_two_stages_goes_on_in_time() -> None:
    assert train.joined([(1.0, 5.0), (2.0, 4.0)], [(0.5, 3.0)]) == [
        (1.0, 5.0),
        (2.0, 4.0),
        (2.5, 3.0),
    ]
    assert train.joined([], [(0.5, 3.0)]) == [(0.5, 3.0)]


def test_the_stages_take_the_whole_time() -> None:
    assert sum(sum(stage.shares.values()) for stage in train.STAGES) == pytest.approx(1.0)


def test_minutes_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_folder, "shape_of", small)
    monkeypatch.setattr(train, "_SAVE_EVERY_S", 0.0)
    train.train(Options(tmp_path, minutes=0.01, batch_tokens=256, half=False), lambda *_: None)
    assert (tmp_path / "baton-tiny-draft" / "model.safetensors").is_file()


def test_the_evaluation_says_all_that_is_wanted(
    trained: tuple[Path, list[tuple[str, float]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = trained
    path = tmp_path / "found.json"
    monkeypatch.setattr(evaluate, "RECALL_TOKENS", 100)  # a long prompt takes its time
    evaluate.main(["--folder", str(folder), "--each", "1", "--json", str(path), "--card"])
    found: JsonObject = json.loads(path.read_text())
    assert set(LIMITS) < set(found)
    assert all(0.0 <= found[name] <= 1.0 for name in LIMITS)
    assert set(found["exact_by_task"]) == set(found["answers"])
    shown = capsys.readouterr().out
    assert "acceptance_k4" in shown and LONG_RECALL in shown
    for name in ("baton-tiny", "baton-tiny-draft"):
        reported = (folder / name / "README.md").read_text()
        assert reported.startswith(f"# {name}\n")
        assert f"| exact_overall | {found['exact_overall']:.3f} | 0.95 |" in reported
        assert f"| lists | {found['answers']['lists']} |" in reported


def test_questions_are_held_out_long_enough_and_the_same_again(
    trained: tuple[Path, list[tuple[str, float]]],
) -> None:
    tokenizer = train.kept_tokenizer(Options(trained[0]))
    encoder = ChatEncoder(tokenizer)
    asked = evaluate.questions(encoder, 2, seed=7)
    assert asked == evaluate.questions(encoder, 2, seed=7)
    assert asked != evaluate.questions(encoder, 2, seed=8)
    long = [one for one in asked if one.task == LONG_RECALL]
    assert len(long) == 2
    for one in long:
        code = tokenizer.decode(one.answer).removeprefix("The code word is ").rstrip(".")
        assert tokenizer.decode(one.prompt[:40]).count(code) == 1
        assert 1500 < len(one.prompt) + len(one.answer) <= 2048


def test_a_state_of_another_model_is_refused(
    trained: tuple[Path, list[tuple[str, float]]],
) -> None:
    folder, _ = trained
    with pytest.raises(ConfigError, match="another model"):
        train.train(Options(folder, steps=9), lambda *_: None)


def test_the_command_reads_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[Options] = []
    monkeypatch.setattr(train, "train", lambda options, note: got.append(options))
    train.main(["--minutes", "3", "--folder", "x", "--seed", "4", "--no-half", "--from", "y"])
    (options,) = got
    assert options.base == Path("y")
    assert (options.minutes, options.folder, options.seed) == (3.0, Path("x"), 4)
    assert not options.half
    assert "baton.models.evaluation.evaluate" in capsys.readouterr().out


def test_kept_weights_are_averaged_with_the_last_ones() -> None:
    model = TrainingModel(small("baton-tiny", 64), seed=1)
    before = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    last = {name: weight.clone() for name, weight in model.state_dict().items()}
    train.keep(model, before, 0.25)
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, 0.75 * last[name])
