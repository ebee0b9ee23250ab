"""The values that production's parts get in a simulation: a request, its prompt for a handoff, and
the router's view of a worker. Holds no state."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.context import Context

from baton.decode_worker.sequences import Group, Request
from baton.decode_worker.sequences import Sequence as TokenSequence
from baton.prefill_worker.prompts import Prompt
from baton.proto import worker_pb2
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.request_need import Source
from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_view import KvFormat, WorkerView
from baton.runtime.identity import NO_TENANT
from baton.runtime.sampling import SamplingParams
from baton.simulation.capacity.decode_stage import DecodeStage
from baton.simulation.capacity.prefill_stage import PrefillStage
from baton.simulation.capacity.request_record import RequestRecord
from baton.simulation.capacity.trace_tokens import BlockTokens

ROOT = bytes(16)
GREEDY = SamplingParams(temperature=0.0)
WIRE_SAMPLING = worker_pb2.Sampling()
NO_TRACE = Context()


def held_by(holders: Holders) -> Callable[[KvFormat], Holders]:
    """Return the holders for any format: there is one."""
    return lambda kv_format: holders


def request_of(
    number: int,
    record: RequestRecord,
    names: list[bytes],
    now_s: float,
    *,
    block_tokens: int,
    local: bool,
) -> Request:
    """Return the request of a record, which goes on after the tokens that the record has."""
    asked = record.request
    request = Request(
        request_id=str(number),
        attempt=0,
        prompt=BlockTokens(names, asked.prompt_tokens, record.tokens, number, block_tokens),
        sampling=GREEDY,
        wire_sampling=WIRE_SAMPLING,
        max_tokens=asked.output_tokens - record.tokens,
        stop_token_ids=frozenset(),
        local=local,
        candidates=[],
        cache_salt=b"",
        root=ROOT,
        trace=NO_TRACE,
        arrived_s=now_s,
        arrived_wall_s=now_s,
        emit=lambda update: None,
    )
    request.sequences = [TokenSequence(request, 0, [])]
    return request


def prompt_of(group: Group, source: Source | None) -> Prompt:
    """Return what a decode worker asks a prefill worker to compute, which may READ from a
    source."""
    return Prompt(
        request_id=group.request.request_id,
        tokens=group.tokens,
        prompt_tokens=len(group.request.prompt),
        held_blocks=group.held,
        params=GREEDY,
        choices=[sequence.choice for sequence in group.sequences],
        identities=group.identities,
        tenant=NO_TENANT,
        trace=NO_TRACE,
        arrived_wall_s=0.0,
        on_end=lambda prompt: None,
        source=None if source is None else _wire_source(source),
    )


def _wire_source(source: Source) -> worker_pb2.Source:
    worker = worker_pb2.Candidate(worker_id=source.worker.worker_id)
    return worker_pb2.Source(worker=worker, blocks=source.blocks)


def view_of(
    stage: DecodeStage | PrefillStage,
    bit: int,
    costs: WorkerCosts,
    *,
    joined_s: float,
    draining: bool = False,
) -> WorkerView:
    """Return what the router would know of the worker by a load report of now."""
    role, active, promised, wanted = "prefill", 0, 0, 0
    if isinstance(stage, DecodeStage):
        scheduler = stage.scheduler
        role, running, active = "decode", scheduler.running, scheduler.active_requests
        promised, wanted = scheduler.promised_blocks, scheduler.queue.wanted_blocks
        pairs = scheduler.queue.local_pairs + scheduler.chunks.remaining_pairs
    else:
        running, pairs = stage.scheduler.computing, stage.scheduler.queued_pairs
    return WorkerView(
        worker_id=stage.worker_id,
        boot_id=stage.worker_id.encode(),
        role=role,
        address="",
        kv_format=KvFormat("simulated", "simulated", stage.pool.block_size),
        running=running,
        active_requests=active,
        waiting=stage.scheduler.waiting,
        free_blocks=stage.pool.available,
        total_blocks=stage.pool.total,
        promised_blocks=promised,
        waiting_blocks=wanted,
        queued_tokens=stage.scheduler.queued_tokens,
        queued_pairs=pairs,
        draining=draining,
        bit=bit,
        joined_s=joined_s,
        costs=costs,
    )
