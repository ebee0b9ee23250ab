"""Loads a worker's engine as its settings say: in this process or over ranks, on a CPU or on GPUs.

Keeps no state.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from baton.deploy.host.load_progress import LoadProgress
from baton.deploy.host.restarts import UNHEALTHY_EXIT
from baton.deploy.processes.draft_choice import draft_folder
from baton.engine.execution.device_choice import chosen_device, device_label
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine
from baton.engine.execution.torch_engine import TorchEngine
from baton.runtime import logs
from baton.runtime.config import Config
from baton.runtime.registry import Role

log = logs.get(__name__)


def load_engine(config: Config, role: Role, model_folder: Path) -> TorchEngine:
    """Its engine, with the model's weights and a pool. Raises ConfigError or ModelError."""
    started = time.monotonic()
    settings = config.worker
    options = EngineOptions(
        blocks=config.pool.blocks,
        block_size=config.pool.block_size,
        dtype=settings.dtype,
        threads=settings.threads,
        max_context=settings.max_context,
        memory_fraction=config.pool.memory_fraction,
        deterministic=settings.deterministic,
        quantization=settings.quantization,
        kv_dtype=config.pool.kv_dtype,
        device=settings.device,
        max_rows=config.step.max_sequences if role == "decode" else 1,  # for graphs
        step_tokens=max(config.step.prefill_tokens, config.step.local_prefill_tokens),
        draft_folder=draft_folder(settings, model_folder),
        draft_kind="eagle3" if settings.speculate == "eagle3" else "draft",
    )
    engine = (
        build_engine(model_folder, options, LoadProgress())
        if settings.tp == 1
        else _build_ranks(model_folder, settings.tp, settings.ep, options)
    )
    log.info(
        "model loaded",
        model=model_folder.name,
        device=device_label(engine.pool.tensor.device),
        seconds=round(time.monotonic() - started, 2),
        kv_blocks=engine.pool.blocks,
        kv_tokens=engine.pool.blocks * config.pool.block_size,
        kv_bytes=engine.pool.blocks * engine.pool.block_bytes,
    )
    if engine.memory is not None:
        log.info("memory planned", plan=engine.memory.line(), **asdict(engine.memory))
    return engine


def _build_ranks(model_folder: Path, ranks: int, ep: int, options: EngineOptions) -> TorchEngine:
    """Build an engine over `ranks` processes, in `ep` groups: on GPUs that follow each other, or on
    the CPU, where they share this one's threads."""
    device = chosen_device(options.device)
    if device.type != "cpu":
        from baton.engine.device_ranks.device_loading import build_device_rank_engine

        options = replace(options, device=str(device))
        return build_device_rank_engine(
            model_folder, ranks, options, LoadProgress(), ep=ep, lost=_end_without_a_rank
        )
    from baton.engine.ranks.loading import build_rank_engine  # it needs numba; GPUs do not

    threads = (options.threads or torch.get_num_threads()) // ranks
    options = replace(options, threads=max(1, threads))
    return build_rank_engine(model_folder, ranks, options, LoadProgress(), ep=ep)


def _end_without_a_rank(reason: str) -> None:
    """End this process at once: its device may wait for the lost rank for ever, and only the end of
    the process tells routers and peers, whose requests migrate."""
    log.error("rank lost", detail=reason)
    os._exit(UNHEALTHY_EXIT)
