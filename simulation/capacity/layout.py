"""The subject of a simulation: workers, their settings, and the objectives of requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.planner.traces import BLOCK_TOKENS
from baton.runtime.config import PlacementMode, RouterConfig, StepConfig
from baton.runtime.errors import ConfigError

MAX_WORKERS = 10_000


@dataclass(frozen=True, slots=True)
class Layout:
    """`prefill` and `decode` workers, or `colocated` ones that compute prompts and decode. Pools
    are in tokens; a worker has `gpus_per_worker` GPUs."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    pool_tokens: int = 1 << 20
    chunk_tokens: int = 8192  # of one prompt in a prefill worker's step
    local_chunk_tokens: int = 512  # of all prompts in a step of a decode or colocated worker
    max_sequences: int = 256
    gpus_per_worker: int = 1
    block_tokens: int = BLOCK_TOKENS  # at most; smaller ones cost time, and divide a trace's blocks
    prefill_tokens: int = 0  # of all prompts in a prefill worker's step; 0: `chunk_tokens`

    def __post_init__(self) -> None:
        if self.colocated and (self.prefill or self.decode):
            raise ConfigError("give --colocated alone, or --prefill and --decode")
        if not self.colocated and not (self.decode and self.prefill):
            raise ConfigError(
                f"{self.prefill} prefill and {self.decode} decode workers: give at least one of "
                "each, or --colocated"
            )
        if self.workers > MAX_WORKERS:
            raise ConfigError(f"{self.workers} workers, and {MAX_WORKERS} are the most")
        if self.block_tokens < 1 or BLOCK_TOKENS % self.block_tokens:
            raise ConfigError(
                f"blocks of {self.block_tokens} tokens do not divide a trace's {BLOCK_TOKENS}: "
                "give a power of two"
            )
        if self.pool_tokens < self.block_tokens:
            raise ConfigError(f"a pool of {self.pool_tokens} tokens has no block: give more")

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def name(self) -> str:
        if self.colocated:
            return f"{self.colocated} colocated"
        return f"{self.prefill} prefill, {self.decode} decode"

    @property
    def blocks(self) -> int:
        return self.pool_tokens // self.block_tokens

    def with_blocks_of_chunks(self) -> Layout:
        """Return the layout with blocks that are no longer than its chunks: a scheduler computes a
        block at least."""
        chunk = self.local_chunk_tokens
        if not self.colocated:
            chunk = min(chunk, self.chunk_tokens)
        return replace(self, block_tokens=min(self.block_tokens, 1 << (chunk.bit_length() - 1)))

    def steps(self) -> StepConfig:
        """Return the settings of a worker's steps."""
        return StepConfig(
            prefill_tokens=self.prefill_tokens or self.chunk_tokens,
            chunk_tokens=self.chunk_tokens,
            local_prefill_tokens=self.local_chunk_tokens,
            max_sequences=self.max_sequences,
        )


@dataclass(frozen=True, slots=True)
class Objectives:
    """The bounds under which a request counts for goodput: the time to its first token, and the
    mean time between its tokens. Infinite: no objective."""

    ttft_s: float = float("inf")
    itl_s: float = float("inf")

    def met_by(self, ttft_s: float, mean_gap_s: float) -> bool:
        """Return whether a finished request with these times met all objectives."""
        return ttft_s <= self.ttft_s and mean_gap_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class CapacityScenario:
    """One simulation, but for its traffic and timing."""

    layout: Layout
    objectives: Objectives = field(default_factory=Objectives)
    gpu_hour_price: float = 0.0  # of one GPU, in any currency
    every_token: bool = False
    placement: PlacementMode = (
        RouterConfig().placement
    )  # of prompts, where there are prefill workers
