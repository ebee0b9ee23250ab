"""Defaults that a GPU changes: a setting that the operator leaves out has another value there.

A GPU computes a prompt of 8,192 tokens faster than a CPU one of 256, and its memory is the
workers' own, where a CPU's is shared by all processes. Keeps no state.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from baton.runtime.config import Config
from baton.runtime.settings.checks import validate
from baton.runtime.settings.loading import given_names

GPU_MEMORY_FRACTION = 0.9
GPU_STEP_TOKENS = 8192
GPU_SEQUENCES = 256  # the largest graph's
# A device moves the default READ in a third of what posting it and hearing of its end take. Two in
# flight still land within a READ's timeout from the slowest peer that is not degraded.
GPU_READ_BYTES = 96 << 20


def worker_config(config: Config, file: Path | None, flags: Mapping[str, str]) -> Config:
    """`config`, which was loaded from `file`, the environment and `flags`, with the defaults of the
    device that `worker.device` means here. Raises ConfigError if that device is not there."""
    from baton.engine.execution.device_choice import chosen_device

    if chosen_device(config.worker.device).type == "cpu":
        return config
    return on_gpu(config, given_names(file, os.environ, flags))


def on_gpu(config: Config, given: Collection[str]) -> Config:
    """`config` with a GPU's defaults where a setting is not in `given` ("section.key")."""
    size = config.pool.block_size
    defaults = {
        "pool.memory_fraction": GPU_MEMORY_FRACTION,
        "step.prefill_tokens": GPU_STEP_TOKENS,
        "step.chunk_tokens": GPU_STEP_TOKENS - GPU_STEP_TOKENS % size,
        "step.max_sequences": GPU_SEQUENCES,
        "handoff.read_bytes": GPU_READ_BYTES,
        "handoff.window_bytes": 2 * GPU_READ_BYTES,
    }
    for name, value in defaults.items():
        section, key = name.split(".")
        if name not in given:
            changed = replace(getattr(config, section), **{key: value})
            config = replace(config, **{section: changed})
    validate(config)
    return config
