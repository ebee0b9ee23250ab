"""Loads a model folder into an engine that splits the model over processes of this host.

    memories ─▶ ranks start to load ─▶ rank 0 loads here ─▶ free memory ─▶ pool ─▶ decoder, runner

All ranks map the memory of one pool, which has the layout of an unsplit model: a rank writes and
reads its own KV heads of each block. A handoff therefore transfers the same bytes between workers
with any numbers of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.engine.checkpoint.shards import Progress
from baton.engine.checkpoint.weights import load_embedding
from baton.engine.execution import loading
from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.execution.determinism_proof import prove
from baton.engine.execution.draft_loading import DraftWeights, HeadWeights, draft_source
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.memory.host_memory import available_bytes, resident_bytes
from baton.engine.memory.memory_plan import MemoryOffer, PoolForm, plan_memory
from baton.engine.ranks.leading_decoder import LeadingDecoder
from baton.engine.ranks.rank_group import RankGroup
from baton.engine.ranks.rank_message import SLOT_BYTES, SLOTS
from baton.engine.ranks.rank_options import RankOptions
from baton.engine.ranks.rank_parts import LoadedRank, RankParts, board_bytes, load_rank
from baton.engine.ranks.shared_allreduce import SharedAllReduce
from baton.engine.ranks.shared_memory import SharedMemory
from baton.engine.scheduling.batch import DraftWork, Draw, Slice, StepBatch
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.rank_split import check_split
from baton.engine.speculation.draft_model import DraftModel
from baton.runtime.errors import ConfigError
from baton.runtime.sampling import SamplingParams

HUNG_S = 1.0  # wait of a step for a rank; then the worker ends and its requests migrate

_WARM_TOKENS = 48
_WARM_DRAFT = 3  # draws of a step that proposes


class RankRunner(ModelRunner):
    """The leader's runner; its ranks end with it."""

    group: RankGroup

    def close(self) -> None:
        self.group.close()


def build_rank_engine(
    folder: Path,
    ranks: int,
    options: EngineOptions,
    progress: Progress | None = None,
    *,
    ep: int = 1,
) -> TorchEngine:
    """Start the ranks, load the model of `folder` on all of them, and start the leader's device
    thread. `options.threads` are those of one rank; `ep` groups of ranks hold different experts.

    Raises ConfigError and ModelError like `build_engine`, also for errors of a rank, and
    ConfigError for a number of ranks or of groups that does not fit.
    """
    runner = build_rank_runner(folder, ranks, options, progress, ep=ep)
    return TorchEngine(runner, threads=options.threads, draw_costs=runner.measure_draws())


def build_rank_runner(
    folder: Path,
    ranks: int,
    options: EngineOptions,
    progress: Progress | None = None,
    *,
    ep: int = 1,
) -> RankRunner:
    """Same as `build_rank_engine`, for a caller that runs steps in its own thread."""
    if options.dtype == "float16":
        raise ConfigError(
            f"worker.dtype is float16, which the {ranks} ranks of a CPU worker cannot sum: give "
            "auto, bfloat16 or float32, or set worker.tp to 1"
        )
    whole = read_spec(folder, options.max_context)
    check_split(whole, ranks, ep)
    memories = _memories(ranks, whole.vocab_size)
    mine = RankOptions(rank=0, ranks=ranks, folder=folder, engine=options, ep=ep)
    group = RankGroup(mine, memories)
    try:
        return _join(group, memories, load_rank(mine, progress))
    except BaseException:  # an interrupted load leaves no rank behind
        group.close()
        raise


def _memories(ranks: int, vocab_size: int) -> list[SharedMemory]:
    """Create the shared memory for sums, commands and logits."""
    sizes = SharedAllReduce.memory_bytes(ranks), SLOTS * SLOT_BYTES, board_bytes(vocab_size)
    return [SharedMemory.create(size) for size in sizes]


def _join(group: RankGroup, memories: list[SharedMemory], loaded: LoadedRank) -> RankRunner:
    """Size the pool, send it to all ranks, and build the leader's runner."""
    options = loaded.options
    engine = options.engine
    lone, lone_bytes = _lone_draft(loaded)
    weights_bytes = options.ranks * loaded.grown_bytes + lone_bytes
    group.wait_loaded()
    whole = loaded.target.whole
    form = PoolForm(whole, engine.block_size, loaded.dtype, engine.kv_quant, loaded.group)
    each, free_bytes = form.block_bytes, available_bytes()
    loading.check_room(engine.blocks, each, free_bytes, "beside the weights")
    offer = MemoryOffer(weights_bytes, free_bytes, engine.blocks, engine.memory_fraction)
    plan = plan_memory(form, offer, engine.max_context)
    memory = _pool_memory(plan.blocks, each)
    sizes = tuple(each.size_bytes for each in [*memories, memory])
    options = replace(options, blocks=plan.blocks, memory_bytes=sizes)
    group.give_pool(memory, options)
    parts = loaded.with_pool(options, [each.descriptor for each in [*memories, memory]])
    parts.sums.watch(group.check)
    decoder = LeadingDecoder(parts, group)
    runner = RankRunner(whole, parts.pool, decoder, engine.max_context, parts.sampler)
    runner.group = group
    if lone is not None:
        lone.attach(runner, CpuBackend(engine.backend))
    elif loaded.draft is not None:
        runner.draft = _shared_draft(runner, decoder, loaded.draft.whole, parts)
    warm_up(runner)
    if engine.deterministic:
        runner.numerics = options.numerics(prove(runner))
    runner.memory = plan
    parts.sums.timeout_s = HUNG_S
    return runner


def _lone_draft(loaded: LoadedRank) -> tuple[DraftWeights | HeadWeights | None, int]:
    """Load a draft model or head that the leader computes alone, and return the bytes that it
    takes; None: there is none, or the ranks share it."""
    folder, whole = loaded.options.folder, loaded.target.whole
    source = draft_source(folder, whole, loaded.options.engine)
    if source is None or loaded.draft is not None:
        return None, 0
    before = resident_bytes()
    table = partial(
        load_embedding, folder, whole, loaded.dtype, CpuBackend().matrices(loaded.dtype)
    )
    found = source.load(loaded.dtype, table)
    return found, max(resident_bytes() - before, 0)


def _shared_draft(
    runner: RankRunner, decoder: LeadingDecoder, spec: ModelSpec, parts: RankParts
) -> DraftModel:
    """Return the draft model of `spec`, which all ranks compute and the leader draws from."""
    assert parts.pool.draft is not None
    draft = decoder.of_draft()
    return DraftModel(spec, draft, parts.pool.draft, runner.max_context, parts.sampler)


def _pool_memory(blocks: int, each_bytes: int) -> SharedMemory:
    try:
        return SharedMemory.create(blocks * each_bytes)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"pool.blocks is {blocks}, of {each_bytes} bytes each: the system refused "
            f"{blocks * each_bytes} bytes of shared memory; give fewer blocks"
        ) from error


def warm_up(runner: RankRunner) -> None:
    """Compile every kernel on all ranks before serving, while no step has a time limit."""
    size = runner.pool.block_size
    blocks = tuple(range(min(runner.pool.blocks, 2 * -(-_WARM_TOKENS // size))))
    half = len(blocks) // 2
    tokens = [0] * min(half * size, _WARM_TOKENS, runner.max_context - 1)
    draws = tuple(
        Draw(0, len(tokens) + row, SamplingParams(temperature=0.0)) for row in range(_WARM_DRAFT)
    )
    work = None if runner.draft is None else DraftWork()
    runner.run(StepBatch((Slice(tokens, 0, blocks[:half], draws[:1], draft=work),)))
    step = Slice([0], len(tokens) - 1, blocks[:half], draws[:1])
    runner.run(StepBatch((step, Slice(tokens, 0, blocks[half:]))))
    if runner.draft is not None:
        asked = DraftWork((), _WARM_DRAFT - 1)
        start = max(0, len(tokens) - _WARM_DRAFT)
        runner.run(StepBatch((Slice([0], start, blocks[:half], draws, draft=asked),)))
