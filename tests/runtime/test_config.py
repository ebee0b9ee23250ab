"""The settings' bounds: every number has one, and both its ends count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.settings.checks import declared_settings, validate

BOUNDS = {
    name: (setting.low, setting.high)
    for name, setting in declared_settings().items()
    if setting.low is not None and setting.high is not None
}


def changed(name: str, value: object, config: Config | None = None) -> Config:
    config = config or Config()
    section, key = name.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{key: value})})


def test_the_defaults_are_valid() -> None:
    validate(Config())


def test_every_number_has_bounds() -> None:
    numbers = {
        name
        for name, setting in declared_settings().items()
        if type(setting.default) in (int, float)
    }
    assert numbers == set(BOUNDS)


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_a_value_beyond_either_bound_is_refused_by_name(name: str) -> None:
    for value in (BOUNDS[name][0] - 1, BOUNDS[name][1] + 1, float("nan")):
        with pytest.raises(ConfigError, match=rf"^{name} is .*give a value from"):
            validate(changed(name, value))


def test_settings_are_few() -> None:
    assert len(declared_settings()) <= 60


@pytest.mark.parametrize("name", declared_settings())
def test_meaning_is_one_sentence(name: str) -> None:
    meaning = declared_settings()[name].meaning
    assert meaning[0].isupper() and meaning.endswith(".") and ". " not in meaning


@pytest.mark.parametrize("name", sorted(set(BOUNDS) - {"step.chunk_tokens"}))
def test_the_bounds_themselves_are_allowed(name: str) -> None:
    for value in BOUNDS[name]:
        config = changed("step.chunk_tokens", 1 << 20) if name == "pool.block_size" else Config()
        if name == "router.link_silence_s":
            config = changed("router.link_heartbeat_s", 0.01)
        if name == "worker.ep":
            config = changed("worker.tp", 64)
        validate(changed(name, value, config))


def test_groups_that_the_ranks_cannot_form_are_refused() -> None:
    config = changed("worker.tp", 4)
    validate(changed("worker.ep", 2, config))
    with pytest.raises(ConfigError, match="worker.ep is 3 and worker.tp 4: .* a divisor of"):
        validate(changed("worker.ep", 3, config))


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:17"])
def test_devices_that_may_be_named(name: str) -> None:
    validate(changed("worker.device", name))


@pytest.mark.parametrize(
    "name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda0", "cpu:0"]
)
def test_a_wrong_device_is_refused_with_the_right_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"worker.device is .* give auto, cpu, cuda, or cuda:N"):
        validate(changed("worker.device", name))


def test_silence_must_be_longer_than_the_heartbeat() -> None:
    with pytest.raises(ConfigError, match=r"link_silence_s is 0\.5: give a value above"):
        validate(changed("router.link_silence_s", 0.5))


def test_a_chunk_is_whole_blocks() -> None:
    with pytest.raises(ConfigError, match=r"step.chunk_tokens is 250: give a multiple of"):
        validate(changed("step.chunk_tokens", 250))
    validate(changed("pool.block_size", 1, changed("step.chunk_tokens", 250)))
