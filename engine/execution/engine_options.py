"""The options of an engine, which configure the loaders of CPU and GPU runners."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.engine.memory.kv_quant import KV_QUANTS, KvQuant
from baton.engine.spec.quantization_config import LOAD_QUANTIZATIONS, LoadQuantization
from baton.runtime.errors import ConfigError

DraftKind = Literal["draft", "eagle3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of `build_engine`. Raises ConfigError for an unknown `kv_dtype` or `quantization`.

    `blocks` 0: as many as fit into `memory_fraction` of the memory that is free after loading;
    more than fit are refused.
    `dtype` "auto": float32 where the weights are stored so, else bfloat16 (few CPUs compute
    float16 at the same speed, and no compiled decode kernel reads it).
    `threads` 0: torch's default. `max_context` in tokens, 0: the model's own.
    `backend` and `deterministic`: see `backend_choice`.
    `quantization` of plain weights: "none", "int8" or "int4".
    `kv_dtype` of the pool: "int8", "fp8_e4m3", or "auto" for the model's dtype.
    `device`: see `chosen_device`; on a GPU decode steps of up to `max_rows` are captured, and
    memory is reserved for a step of `step_tokens`.
    `draft_folder`: the draft model, or the EAGLE-3 head (`draft_kind` "eagle3"), that proposes for
    slices with draft work, on a CPU.
    """

    blocks: int = 0
    block_size: int = 16
    dtype: str = "auto"
    threads: int = 0
    max_context: int = 0
    memory_fraction: float = 0.5
    backend: str = "auto"
    deterministic: bool = False
    quantization: str = "none"
    kv_dtype: str = "auto"
    device: str = "cpu"
    max_rows: int = 256
    step_tokens: int = 512
    draft_folder: Path | None = None
    draft_kind: DraftKind = "draft"

    def __post_init__(self) -> None:
        if self.quantization not in LOAD_QUANTIZATIONS:
            raise ConfigError(
                f"worker.quantization is {self.quantization!r}: give "
                f"{', '.join(LOAD_QUANTIZATIONS)}"
            )
        if self.kv_dtype != "auto" and self.kv_dtype not in KV_QUANTS:
            raise ConfigError(
                f"pool.kv_dtype is {self.kv_dtype!r}: give auto or one of {', '.join(KV_QUANTS)}"
            )

    @property
    def kv_quant(self) -> KvQuant | None:
        """The quantisation of the pool; None: plain numbers."""
        return KV_QUANTS.get(self.kv_dtype)

    @property
    def draft_label(self) -> str:
        """The proposer's type, as messages name it."""
        return "EAGLE-3 head" if self.draft_kind == "eagle3" else "draft model"

    @property
    def weight_quantization(self) -> LoadQuantization:
        """The quantisation applied to plain weights."""
        return LOAD_QUANTIZATIONS[LOAD_QUANTIZATIONS.index(self.quantization)]
