"""A request's trace tells what was proposed for it."""

from __future__ import annotations

import pytest

from baton.decode_worker.speculator import Speculator
from baton.engine.speculation.draft_length import DraftLengthPolicy
from baton.runtime.config import Config, PoolConfig
from baton.runtime.telemetry import tracing
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.fleet.oracle_proposer import OracleProposer
from tests.support.span_values import span_values
from tests.support.trace_collector import ListeningCollector

PROMPT = list(range(20))
TRACE = {"traceparent": f"00-{7:032x}-00f067aa0ba902b7-01"}


async def test_proposals_are_attributes_of_the_decode_span(
    collector: ListeningCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lengths follow measured times, and a busy machine's are such that nothing is proposed
    monkeypatch.setattr(DraftLengthPolicy, "may_propose", lambda *_: True)
    monkeypatch.setattr(
        DraftLengthPolicy, "choose", lambda _, __, limits: [min(limit, 4) for limit in limits]
    )
    servicer, endpoint = collector
    tracing.setup("decode-0", endpoint)
    oracle = OracleProposer(0.5)
    cluster = Cluster(
        Config(pool=PoolConfig(block_size=4)), lambda _: 0.001, lambda: Speculator(oracle, 4)
    )
    cluster.add_decode("decode-0", 40)
    client = Client(cluster, "decode-0")
    try:
        plain = client.submit(PROMPT, local=True, max_tokens=30)
        await plain.finished()
        oracle.texts = [[*PROMPT, *plain.tokens()]]
        request = client.submit(PROMPT, local=True, max_tokens=30, trace=TRACE)
        await request.finished()
        await cluster.quiet()
    finally:
        tracing.shutdown(10.0)
        await cluster.close()
    (span,) = [s for s in servicer.all if s.name == "decode" and s.trace_id.hex() == f"{7:032x}"]
    reported = span_values(span)
    accepted = sum(output.accepted_proposal for output in request.outputs)
    rejected = sum(output.rejected_proposals for output in request.outputs)
    assert accepted > 0 and rejected > 0
    assert reported["accepted_tokens"] == accepted
    assert reported["proposed_tokens"] == accepted + rejected
