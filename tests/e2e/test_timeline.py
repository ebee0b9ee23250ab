"""The critical path of a request adds up to what its client measured at the socket, over HTTP and
gRPC, disaggregated and local. Nothing is claimed twice: a path is never longer than that."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable

import httpx
import pytest

from baton.proto import client_pb2
from chaos.cluster import Cluster
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.timed_calls import Measured, stream_grpc, stream_http
from tests.support.waiting import wait_until

WORDS = 400  # of a prompt, in chunks of CHUNK tokens
CHUNK = 128
SLACK_S, SLACK_SHARE = 0.001, 0.02
WITHIN = 0.9  # of the requests: the machine may give the router's core to another process
PARTS = {"receive", "parse", "tokenize", "validate", "admit", "place", "send", "credit wait"} | {
    "step wait", "chunk", "first token", "return", "deliver", "detokenize", "write",
}  # fmt: skip
HANDOFF_PARTS = {"connect", "open", "prefill queue"}
AFTER = {"decode queue", "step"}
NUMBERS = itertools.count()  # so that no prompt has the prefix of another
FEW: JsonObject = {"model": "small", "max_tokens": 3, "ignore_eos": True}


def prompt(number: int) -> str:
    return f"{number} " + "a stone " * WORDS


def over_http(cluster: Cluster, number: int) -> Measured:
    return stream_http(cluster.url, "/v1/completions", {"prompt": prompt(number), **FEW})


def chat_over_http(cluster: Cluster, number: int) -> Measured:
    asked = {"messages": [{"role": "user", "content": prompt(number)}], **FEW}
    return stream_http(cluster.url, "/v1/chat/completions", asked)


def over_grpc(cluster: Cluster, number: int) -> Measured:
    asked = client_pb2.GenerateRequest(prompt=prompt(number), **FEW)
    return stream_grpc(cluster.grpc_addresses["router"], cluster.url, asked)


def trace_of(cluster: Cluster, request_id: str) -> JsonObject:
    """The trace, once the router has stored it, which is after the answer's last byte."""

    def reply() -> httpx.Response:
        return httpx.get(f"{cluster.url}/trace/{request_id}", timeout=60)

    wait_until(lambda: reply().status_code == 200, show=lambda: reply().text)
    return dict(reply().json())


@pytest.fixture(scope="module")
def make_fleet(make_shared_cluster: Callable[..., Cluster]) -> Callable[[str], Cluster]:
    made: dict[str, Cluster] = {}

    def make(placement: str) -> Cluster:
        if placement not in made:
            made[placement] = make_shared_cluster(
                f"router.placement={placement}",
                "router.grpc_port=0",
                f"step.chunk_tokens={CHUNK}",
                f"step.prefill_tokens={CHUNK}",
                f"step.local_prefill_tokens={CHUNK}",
            ).start(1 if placement == "disaggregated" else 0, 1)
        return made[placement]

    return make


Ask = Callable[[Cluster, int], Measured]
CASES = [
    (ask, placement)
    for ask in (over_http, chat_over_http, over_grpc)
    for placement in ("disaggregated", "local")
]


def missing_of(cluster: Cluster, ask: Ask, count: int) -> list[float]:
    """What the sums of so many requests lack of their clients' times, as a share of the slack. No
    sum may be longer than its client's time."""
    ask(cluster, next(NUMBERS))  # the first contact, and what is computed for the first time
    shares = []
    for _ in range(count):
        measured = ask(cluster, next(NUMBERS))
        found = trace_of(cluster, measured.request_id)
        sum_s = sum(us for _, us, _, _ in found["path"]) / 1e6
        assert sum_s == pytest.approx(found["ttft_s"], abs=1e-4)
        missing_s = measured.seconds - sum_s
        assert missing_s > -0.0002, (measured, found)
        shares.append(missing_s / max(SLACK_S, SLACK_SHARE * measured.seconds))
        print(f"{measured.seconds:.4f} {sum_s:.4f} {1e3 * missing_s:.2f} ms")
    return shares


@pytest.mark.parametrize(("ask", "placement"), CASES)
def test_a_path_adds_up_to_the_time_of_its_client(
    make_fleet: Callable[[str], Cluster], ask: Ask, placement: str
) -> None:
    """Most of them: the machine may give another process the router's core."""
    assert statistics.median(missing_of(make_fleet(placement), ask, 5)) <= 1


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ask", "placement"), CASES)  # 204 in all
def test_the_paths_of_200_requests_add_up(
    make_fleet: Callable[[str], Cluster], ask: Ask, placement: str
) -> None:
    shares = missing_of(make_fleet(placement), ask, 34)
    assert statistics.median(shares) <= 0.5, shares
    assert sum(share <= 1 for share in shares) >= WITHIN * len(shares), shares


@pytest.mark.parametrize("placement", ["disaggregated", "local"])
def test_a_path_has_each_part_once_in_order(
    make_fleet: Callable[[str], Cluster], placement: str
) -> None:
    cluster = make_fleet(placement)
    found = trace_of(cluster, over_http(cluster, next(NUMBERS)).request_id)
    names = [name for name, *_ in found["path"]]
    wanted = PARTS | (HANDOFF_PARTS if placement == "disaggregated" else set())
    assert set(names) == wanted
    order = ["receive", "tokenize", "place", "credit wait", "chunk", "return", "write"]
    assert [name for name in dict.fromkeys(names) if name in order] == order
    chunks = [(count, where) for name, _, count, where in found["path"] if name == "chunk"]
    assert len(chunks) > 2 and sum(count for count, _ in chunks) == found["prompt_tokens"]
    worker = "prefill-0" if placement == "disaggregated" else "decode-0"
    assert {where for _, where in chunks} == {worker}
    assert {name for name, *_ in found["after"]} >= AFTER
    assert "stone" not in json.dumps(found)
    if placement == "disaggregated":
        ends = [end for _, _, end, _ in found["offers"]]
        assert len(ends) > 2 and found["read_bytes"] and found["reads"] and found["transport"]
        assert ends[0] < found["after_us"] < ends[-1] + 1e6 * slowness()  # the first was hidden
        assert {"fetch", "verify"} <= {name for name, *_ in found["after"]}
