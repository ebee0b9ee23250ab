"""A training run: the loss falls, a saved run goes on as if never ended, a student learns."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from baton.models.embedded import embedded_model
from baton.models.training.batches import Batches
from baton.models.training.optimiser import Rates
from baton.models.training.tiny_tokenizer import ChatEncoder
from baton.models.training.training_model import TinyShape, TrainingModel
from baton.models.training.training_run import TrainingRun, height
from baton.runtime.errors import ConfigError

pytestmark = pytest.mark.nightly

TOKENIZER = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
SHAPE = TinyShape(1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=48, vocab=3712)


def run(
    seed: int = 0, shape: TinyShape = SHAPE, teacher: TrainingModel | None = None
) -> TrainingRun:
    """At high rates: a model so small needs few steps at them."""
    batches, rates = Batches(ChatEncoder(TOKENIZER), 512, seed), Rates(0.02, 0.004)
    return TrainingRun(TrainingModel(shape, seed), batches, rates, teacher, half=False)


def weights(of: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in of.model.state_dict().items()}


def test_the_loss_falls_and_is_noted_by_task() -> None:
    training = run()
    losses = [training.step(0.03) for _ in range(40)]
    assert losses[0] > 7.5
    assert losses[-1] < 5.0
    assert training.progress.step == 40
    assert training.progress.tokens > 40 * 256
    assert {"arithmetic", "lists", "json"} <= set(training.progress.by_task)


def test_a_saved_run_goes_on_as_if_it_had_never_ended(tmp_path: Path) -> None:
    whole = run()
    for _ in range(6):
        whole.step(0.1)
    first = run()
    for _ in range(3):
        first.step(0.1)
    first.progress.elapsed_s = 12.5
    first.progress.losses.append((0.2, 7.0))
    first.save(tmp_path)
    second = run(seed=0)
    assert second.load(tmp_path)
    assert second.progress == first.progress
    for _ in range(3):
        second.step(0.1)
    for name, weight in weights(whole).items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_nothing_saved_is_a_new_run_and_another_model_is_refused(tmp_path: Path) -> None:
    assert not run().load(tmp_path)
    run().save(tmp_path)
    wider = TinyShape(1, hidden=64, heads=2, kv_heads=1, head_dim=16, ffn=48, vocab=3712)
    with pytest.raises(ConfigError, match="--folder"):
        run(shape=wider).load(tmp_path)
    deeper = TinyShape(2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=48, vocab=3712)
    with pytest.raises(ConfigError, match="another model"):
        run(shape=deeper).load(tmp_path)


def test_a_save_that_breaks_off_leaves_the_one_before(tmp_path: Path) -> None:
    training = run()
    training.save(tmp_path)
    (tmp_path / "state.draft").write_bytes(b"half")
    training.step(0.1)
    assert run().load(tmp_path)
    training.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_student_comes_closer_to_its_teacher() -> None:
    teacher = TrainingModel(SHAPE, seed=7)
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(20)
    student = run(seed=1, teacher=teacher)
    batch = Batches(ChatEncoder(TOKENIZER), 512, 1).batch(1000, 0.03)

    def log_shares(model: TrainingModel) -> torch.Tensor:
        return model.logits(model(batch.tokens)[batch.rows, batch.columns]).log_softmax(-1)

    def distance() -> float:
        """Kullback and Leibler's, from the teacher, for each counted token."""
        with torch.no_grad():
            wanted, found = log_shares(teacher), log_shares(student.model)
            return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    before = distance()
    fixed = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    for _ in range(30):
        student.step(0.03)
    assert distance() < 0.8 * before
    for name, weight in teacher.state_dict().items():
        assert torch.equal(weight, fixed[name])


def test_half_precision_gives_nearly_the_same_loss() -> None:
    batches = Batches(ChatEncoder(TOKENIZER), 512, 0)
    half = TrainingRun(TrainingModel(SHAPE, 0), batches, Rates(), half=True)
    assert half.step(0.1) == pytest.approx(run().step(0.1), rel=0.01)
    assert all(weight.dtype == torch.float32 for weight in half.model.parameters())


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiled passes take g++")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own
def test_compiled_passes_give_the_same_weights() -> None:
    batches = Batches(ChatEncoder(TOKENIZER), 128, 0)
    plain = TrainingRun(TrainingModel(SHAPE, 0), batches, Rates(), half=False)
    compiled = TrainingRun(TrainingModel(SHAPE, 0), batches, Rates(), half=False, compiled=True)
    for _ in range(2):
        assert compiled.step(0.0) == pytest.approx(plain.step(0.0), rel=1e-4)
    for name, weight in weights(plain).items():
        assert torch.allclose(weight, compiled.model.state_dict()[name], atol=1e-3), name


def test_rates_rise_stay_and_fall() -> None:
    assert 0 < height(0, 0.0) < height(5, 0.0) < height(500, 0.3) == 1.0
    assert 1.0 > height(500, 0.7) > height(500, 0.9) > 0
    assert height(500, 1.0) == height(500, 1.1) == 0.0
