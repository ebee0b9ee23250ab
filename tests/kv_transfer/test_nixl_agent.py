"""The agent's thread against scripted bindings: every answer NIXL may give, at a known time."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.kv_transfer import nixl_agent
from baton.kv_transfer.local_pool import DevicePool, HostPool
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_agent import NixlAgent, load_bindings
from baton.kv_transfer.piece_queue import PieceQueue
from baton.kv_transfer.pieces import Landed, cut
from baton.runtime.errors import ConfigError, ReadFailed
from baton.simulation.scripted_nixl import Ended, ScriptedAgent

BLOCKS = 8
BLOCK_BYTES = 64
PEER = b"P" * 16
DEADLINE_S = 30.0

Made = tuple[NixlAgent, ScriptedAgent]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedAgent:
    fake = ScriptedAgent()
    bindings = SimpleNamespace(
        nixl_agent=lambda name, config: fake, nixl_agent_config=lambda **options: options
    )
    monkeypatch.setattr(nixl_agent, "load_bindings", lambda: bindings)
    monkeypatch.setattr(nixl_agent, "STOP_PATIENCE_S", 0.2)
    monkeypatch.setattr(nixl_agent, "STUMBLE_PAUSE_S", 0.001)
    return fake


def opened() -> NixlAgent:
    return NixlAgent(host_pool(), "name", PieceQueue())


@pytest.fixture
def made(scripted: ScriptedAgent) -> Iterator[Made]:
    agent = opened()
    yield agent, scripted
    agent.stop()
    assert not agent._thread.is_alive()


def host_pool() -> HostPool:
    return HostPool(np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8), 1)


def device_pool(entered: list[str] | None = None) -> DevicePool:
    """Of addresses alone: nothing here may touch them."""

    def enter() -> None:
        if entered is not None:
            entered.append(threading.current_thread().name)

    def summing(blocks: Sequence[int], seeds: Sequence[int]) -> Any:
        raise AssertionError("no sums were asked for")

    return DevicePool(7 << 40, BLOCKS, BLOCK_BYTES, 1, 2, summing, enter)


def peer(boot_id: bytes = PEER, name: bytes = b"peer") -> PeerPool:
    return PeerPool(boot_id, "nixl", name, 1 << 33, BLOCK_BYTES, 5, 3)


def there(agent: NixlAgent, action: Callable[[], Any]) -> Any:
    """Do something in the agent's thread; its result, or what it raised."""
    done = threading.Event()
    result: list[Any] = []

    def command() -> None:
        try:
            result.append(action())
        except Exception as error:
            result.append(error)
        done.set()

    assert agent.do(command)
    assert done.wait(DEADLINE_S)
    return result[0]


def start_read(
    agent: NixlAgent,
    remote: Sequence[int] = (4, 0),
    local: Sequence[int] = (7, 2),
    landed: Landed | None = None,
    step: int = BLOCKS,
) -> Ended:
    """Queue a READ and wait until the agent's thread has posted it."""
    ended = Ended()
    agent._pieces.add(cut(PEER, remote, local, step, landed, ended))
    agent.wake()
    assert [there(agent, lambda: None) for _ in range(2)]  # a turn later
    return ended


def test_descriptors_cover_both_whole_pools_without_a_row_per_block(made: Made) -> None:
    agent, fake = made
    assert there(agent, lambda: agent.connect(peer())) is None
    assert fake.descriptors["peer"].tolist() == [[1 << 33, BLOCK_BYTES, 3, BLOCK_BYTES, 5]]
    (own,) = fake.descriptors["NIXL_INIT_AGENT"].tolist()
    assert own[1:] == [BLOCK_BYTES, 0, BLOCK_BYTES, BLOCKS]
    assert agent.metadata == b"metadata"


def test_a_devices_pool_is_registered_and_described_as_what_it_is(
    scripted: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", raising=False)
    entered: list[str] = []
    agent = NixlAgent(device_pool(entered), "name", PieceQueue())
    there(agent, lambda: agent.connect(peer()))
    agent.stop()
    assert entered == ["nixl-name"]  # where NIXL is called, once
    assert scripted.regions == [(7 << 40, BLOCKS * BLOCK_BYTES, 2, "")]
    own = scripted.descriptors["NIXL_INIT_AGENT"].tolist()
    assert own == [[7 << 40, BLOCK_BYTES, 2, BLOCK_BYTES, BLOCKS]]
    # a peer's pool is of the peer's kind, whatever the own one is
    assert scripted.memory == {"NIXL_INIT_AGENT": "VRAM", "peer": "DRAM"}
    assert os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"


def test_a_host_reads_a_devices_pool(made: Made) -> None:
    agent, fake = made
    far = dataclasses.replace(peer(), memory="VRAM", device_id=6)
    there(agent, lambda: agent.connect(far))
    assert fake.memory == {"NIXL_INIT_AGENT": "DRAM", "peer": "VRAM"}
    assert fake.descriptors["peer"][0, 2] == 6


def test_memory_that_nixl_cannot_register_is_named_with_a_remedy(scripted: ScriptedAgent) -> None:
    scripted.fail.add("register_memory")
    with pytest.raises(ConfigError, match="VRAM of device 2.*UCX_TLS.*worker.device to cpu"):
        NixlAgent(device_pool(), "name", PieceQueue())


def test_nixl_itself_takes_no_hosts_memory_for_a_devices() -> None:
    pytest.importorskip("nixl")
    host = host_pool()
    lying = dataclasses.replace(device_pool(), address=host.address, device_id=0)
    with pytest.raises(ConfigError, match="VRAM of device 0"):
        NixlAgent(lying, "name", PieceQueue())


def test_a_read_that_is_done_when_posted(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    fake.first_state = "DONE"
    assert start_read(agent).wait() is None
    assert fake.indices == [([7, 2], [4, 0])]
    assert "release read 0" in fake.log


def test_a_read_is_polled_until_it_is_done(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    ended = start_read(agent)
    fake.wait_polls(5)
    assert not ended.told and agent.unsettled == 1
    fake.posted[0].state = "DONE"
    assert ended.wait() is None
    fake.wait_polls(2)
    assert agent.unsettled == 0 and fake.log.count("release read 0") == 1


@pytest.mark.parametrize(("state", "says"), [("ERR", "ERR"), ("raise", "remote disconnected")])
def test_an_error_ends_a_read_once_and_keeps_its_cause(made: Made, state: str, says: str) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    ended = start_read(agent)
    fake.posted[0].state = state
    failure = ended.wait()
    assert isinstance(failure, ReadFailed) and says in str(failure)
    fake.wait_polls(3)
    assert len(ended.told) == 1


def test_posting_that_raises_ends_the_read(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    fake.first_state = ConnectionError("gone")
    failure = start_read(agent).wait()
    assert isinstance(failure, ReadFailed) and isinstance(failure.__cause__, ConnectionError)


@pytest.fixture
def in_pieces(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[Ended, list[tuple[int, int]]]]:
    """Starts a READ of five blocks, two to a piece; returns its end and what was told before."""
    agent, _ = made
    there(agent, lambda: agent.connect(peer()))

    def start(landed: Landed | None = None) -> tuple[Ended, list[tuple[int, int]]]:
        told: list[tuple[int, int]] = []
        look = landed or (lambda first, end: told.append((first, end)))
        return start_read(agent, [4, 0, 1, 2, 3], [7, 2, 6, 5, 0], look, step=2), told

    return start


def test_pieces_are_told_of_as_they_land_and_the_end_comes_last(made: Made, in_pieces: Any) -> None:
    _, fake = made
    ended, told = in_pieces()
    assert fake.indices == [([7, 2], [4, 0]), ([6, 5], [1, 2]), ([0], [3])]
    for number in (1, 0):
        fake.posted[number].state = "DONE"
        fake.wait_polls(2)
    assert told == [(2, 4), (0, 2)] and not ended.told
    fake.posted[2].state = "DONE"
    assert ended.wait() is None
    assert told[2:] == [(4, 5)]


def test_a_failed_piece_fails_the_read_once_the_others_have_settled(
    made: Made, in_pieces: Any
) -> None:
    _, fake = made
    ended, told = in_pieces()
    fake.posted[0].state = "ERR"
    fake.wait_polls(3)
    assert not ended.told  # bytes of the others may still land
    fake.posted[1].state = fake.posted[2].state = "DONE"
    assert "ERR" in str(ended.wait())
    assert len(told) == 2


def test_after_a_piece_that_cannot_be_posted_no_other_is(made: Made, in_pieces: Any) -> None:
    _, fake = made
    fake.fail.add("make_prepped_xfer")
    ended, told = in_pieces()
    assert "scripted to fail" in str(ended.wait())
    assert not fake.posted and not told


def test_a_look_that_raises_fails_the_read_and_nothing_else(made: Made, in_pieces: Any) -> None:
    _, fake = made
    fake.first_state = "DONE"

    def look(first: int, end: int) -> None:
        raise IndexError("no such block")

    ended, _ = in_pieces(look)
    assert "no such block" in str(ended.wait())
    assert in_pieces()[0].wait() is None


def test_an_unknown_peer_is_no_read(made: Made) -> None:
    agent, fake = made
    failure = start_read(agent).wait()
    assert "not connected" in str(failure) and not fake.posted


def test_forgetting_an_idle_peer_releases_it(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    agent.forget(PEER)
    there(agent, lambda: None)
    assert fake.log == ["release blocks of peer", "remove peer"]
    assert "not connected" in str(start_read(agent).wait())


def test_a_peer_with_a_read_under_way_is_kept_until_it_has_ended(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    first, second = start_read(agent), start_read(agent)
    agent.forget(PEER)
    fake.wait_polls(3)
    assert not fake.log and not first.told  # neither released nor settled
    refused = there(agent, lambda: agent.connect(peer()))
    assert isinstance(refused, ReadFailed) and "still under way" in str(refused)
    fake.posted[0].state = "DONE"
    first.wait()
    fake.wait_polls(2)
    assert "remove peer" not in fake.log
    fake.posted[1].state = "ERR"
    second.wait()
    there(agent, lambda: None)
    assert fake.log[-2:] == ["release blocks of peer", "remove peer"]
    assert there(agent, lambda: agent.connect(peer())) is None  # now it may come back


def test_forget_goes_before_a_connect_that_follows_it(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer(name=b"old")))
    agent.forget(PEER)
    there(agent, lambda: agent.connect(peer(name=b"new")))
    assert "remove old" in fake.log and "remove new" not in fake.log
    agent.forget(b"never known 1234")
    assert start_read(agent) and fake.posted


@pytest.mark.parametrize("call", ["add_remote_agent", "prep_peer"])
def test_a_connection_that_fails_is_a_failed_read(made: Made, call: str) -> None:
    agent, fake = made
    fake.fail.add(call)
    refused = there(agent, lambda: agent.connect(peer()))
    assert isinstance(refused, ReadFailed) and isinstance(refused.__cause__, RuntimeError)
    fake.fail.clear()
    assert there(agent, lambda: agent.connect(peer())) is None


def test_handles_that_nixl_will_not_release_stop_nothing(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    fake.fail.add("remove_remote_agent")
    ended = start_read(agent)
    fake.posted[0].stubborn = True
    fake.posted[0].state = "DONE"
    assert ended.wait() is None
    agent.forget(PEER)
    fake.wait_polls(2)


def test_the_thread_survives_a_command_and_a_poll_that_raise(made: Made) -> None:
    agent, fake = made

    def stumble() -> None:
        raise ZeroDivisionError

    assert agent.do(stumble)
    fake.fail.add("get_new_notifs")
    fake.wait_polls(3)
    fake.fail.clear()
    there(agent, lambda: agent.connect(peer()))
    fake.first_state = "DONE"
    assert start_read(agent).wait() is None


def test_everything_runs_in_the_one_thread(made: Made) -> None:
    agent, fake = made
    there(agent, lambda: agent.connect(peer()))
    start_read(agent)
    fake.posted[0].state = "DONE"
    fake.wait_polls(2)
    assert fake.threads == {"nixl-name"}


def test_too_many_commands_are_refused_not_queued(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, _ = made
    hold, held = threading.Event(), threading.Event()

    def block() -> None:
        held.set()
        hold.wait(DEADLINE_S)

    agent.do(block)
    assert held.wait(DEADLINE_S)
    taken = sum(agent.do(lambda: None) for _ in range(nixl_agent.MAX_COMMANDS + 10))
    hold.set()
    assert taken == nixl_agent.MAX_COMMANDS


def test_stopping_releases_everything_in_order(scripted: ScriptedAgent) -> None:
    agent = opened()
    there(agent, lambda: agent.connect(peer()))
    agent.stop()
    assert scripted.log == [
        "release blocks of peer",
        "remove peer",
        "release blocks of NIXL_INIT_AGENT",
        "deregister",
    ]


def test_stopping_with_a_read_under_way_leaves_the_memory_registered(
    scripted: ScriptedAgent,
) -> None:
    agent = opened()
    there(agent, lambda: agent.connect(peer()))
    ended = start_read(agent)
    agent.stop()
    assert not agent._thread.is_alive()
    assert not ended.told and not scripted.log  # never a guess that it has ended


def test_a_failing_start_is_raised_where_it_was_asked_for(scripted: ScriptedAgent) -> None:
    scripted.fail.add("register_memory")
    with pytest.raises(RuntimeError, match="register_memory"):
        opened()


def test_missing_bindings_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_BINDINGS", ("no.such.module", "neither.this"))
    with pytest.raises(ConfigError, match="pip install"):
        load_bindings()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU alone")
def test_agents_of_a_mover_never_share_a_cpu_and_use_all(scripted: ScriptedAgent) -> None:
    agents = [NixlAgent(host_pool(), "name", PieceQueue(), (number, 2)) for number in range(2)]
    seen: list[set[int]] = []
    for agent in agents:
        there(agent, lambda: seen.append(os.sched_getaffinity(0)))
        agent.stop()
    assert not seen[0] & seen[1] and seen[0] | seen[1] == os.sched_getaffinity(0)


def test_more_agents_than_cpus_are_bound_to_none(scripted: ScriptedAgent) -> None:
    cpus = os.sched_getaffinity(0)
    agent = NixlAgent(host_pool(), "name", PieceQueue(), (0, len(cpus) + 1))
    seen: list[set[int]] = []
    there(agent, lambda: seen.append(os.sched_getaffinity(0)))
    agent.stop()
    assert seen == [cpus]
