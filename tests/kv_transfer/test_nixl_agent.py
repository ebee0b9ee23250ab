"""The agent's thread against scripted bindings: its pools, its peers, its start and its end."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import NoReturn

import pytest

from baton.kv_transfer import nixl_agent, nixl_library
from baton.kv_transfer.block_sizes import BlockRatio
from baton.kv_transfer.local_pool import DevicePool
from baton.kv_transfer.nixl_agent import NixlAgent
from baton.kv_transfer.nixl_library import load_bindings
from baton.kv_transfer.segment_queue import SegmentQueue
from baton.runtime.errors import ConfigError, ReadFailed
from tests.support import handoff_stage, nixl_agents
from tests.support.scripted_nixl import ScriptedAgent
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timed

Made = tuple[NixlAgent, ScriptedAgent]


def device_pool(entered: list[str] | None = None) -> DevicePool:
    """Of addresses alone: nothing here may touch them."""

    def enter() -> None:
        if entered is not None:
            entered.append(threading.current_thread().name)

    def summing(blocks: Sequence[int], seeds: Sequence[int]) -> NoReturn:
        raise AssertionError("no sums were asked for")

    return DevicePool(
        7 << 40, nixl_agents.NIXL_BLOCKS, handoff_stage.BLOCK_BYTES, 1, 2, summing, enter
    )


def test_descriptors_cover_both_pools_without_a_row_per_block(made: Made) -> None:
    agent, fake = made
    assert nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer())) is None
    assert fake.descriptors["peer"].tolist() == [
        [1 << 33, handoff_stage.BLOCK_BYTES, 3, handoff_stage.BLOCK_BYTES, 5]
    ]
    (own,) = fake.descriptors["NIXL_INIT_AGENT"].tolist()
    assert own[1:] == [
        handoff_stage.BLOCK_BYTES,
        0,
        handoff_stage.BLOCK_BYTES,
        nixl_agents.NIXL_BLOCKS,
    ]
    assert agent.metadata == b"metadata"


def test_a_device_pool_is_registered_and_described_as_such(
    scripted: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", raising=False)
    entered: list[str] = []
    agent = NixlAgent(device_pool(entered), "name", SegmentQueue())
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    agent.stop()
    assert entered == ["nixl-name"]  # where NIXL is called, once
    assert scripted.regions == [
        (7 << 40, nixl_agents.NIXL_BLOCKS * handoff_stage.BLOCK_BYTES, 2, "")
    ]
    own = scripted.descriptors["NIXL_INIT_AGENT"].tolist()
    assert own == [
        [7 << 40, handoff_stage.BLOCK_BYTES, 2, handoff_stage.BLOCK_BYTES, nixl_agents.NIXL_BLOCKS]
    ]
    # a peer's pool is of the peer's kind, whatever the own one is
    assert scripted.memory == {"NIXL_INIT_AGENT": "VRAM", "peer": "DRAM"}
    assert os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"


def test_a_host_reads_a_devices_pool(made: Made) -> None:
    agent, fake = made
    far = dataclasses.replace(nixl_agents.nixl_peer(), memory="VRAM", device_id=6)
    nixl_agents.there(agent, lambda: agent.connect(far))
    assert fake.memory == {"NIXL_INIT_AGENT": "DRAM", "peer": "VRAM"}
    assert fake.descriptors["peer"][0, 2] == 6


def test_memory_that_nixl_cannot_register_is_named_with_a_remedy(scripted: ScriptedAgent) -> None:
    scripted.fail.add("register_memory")
    with pytest.raises(ConfigError, match="VRAM of device 2.*UCX_TLS.*worker.device to cpu"):
        NixlAgent(device_pool(), "name", SegmentQueue())


def test_nixl_itself_takes_no_hosts_memory_for_a_devices() -> None:
    pytest.importorskip("nixl")
    host = nixl_agents.nixl_pool()
    lying = dataclasses.replace(device_pool(), address=host.address, device_id=0)
    with pytest.raises(ConfigError, match="VRAM of device 0"):
        NixlAgent(lying, "name", SegmentQueue())


def test_forgetting_an_idle_peer_releases_it(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    agent.forget(nixl_agents.PEER)
    nixl_agents.there(agent, lambda: None)
    assert fake.log == ["release blocks of peer", "remove peer"]
    assert "not connected" in str(nixl_agents.start_read(agent).wait())


def test_a_peer_with_a_read_under_way_is_kept_until_it_has_ended(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    first, second = nixl_agents.start_read(agent), nixl_agents.start_read(agent)
    agent.forget(nixl_agents.PEER)
    fake.wait_polls(3)
    assert not fake.log and not first.reported  # neither released nor settled
    refused = nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    assert isinstance(refused, ReadFailed) and "still in flight" in str(refused)
    fake.posted[0].state = "DONE"
    first.wait()
    fake.wait_polls(2)
    assert "remove peer" not in fake.log
    fake.posted[1].state = "ERR"
    second.wait()
    nixl_agents.there(agent, lambda: None)
    assert fake.log[-2:] == ["release blocks of peer", "remove peer"]
    assert (
        nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer())) is None
    )  # now it may come back


def test_forget_goes_before_a_connect_that_follows_it(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer(name=b"old")))
    agent.forget(nixl_agents.PEER)
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer(name=b"new")))
    assert "remove old" in fake.log and "remove new" not in fake.log
    agent.forget(b"never known 1234")
    assert nixl_agents.start_read(agent) and fake.posted


@pytest.mark.parametrize("call", ["add_remote_agent", "prep_peer"])
def test_a_connection_that_fails_is_a_failed_read(made: Made, call: str) -> None:
    agent, fake = made
    fake.fail.add(call)
    refused = nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    assert isinstance(refused, ReadFailed) and isinstance(refused.__cause__, RuntimeError)
    assert fake.log == (["remove peer"] if call == "prep_peer" else [])
    fake.fail.clear()
    assert nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer())) is None


def test_a_peer_is_removed_if_the_own_blocks_cannot_be_prepared(made: Made) -> None:
    agent, fake = made
    fake.fail.add("prep_xfer_dlist")
    half_bytes = handoff_stage.BLOCK_BYTES // 2
    half = dataclasses.replace(
        nixl_agents.nixl_peer(),
        block_bytes=half_bytes,
        unit_bytes=half_bytes,
        ratio=BlockRatio(joined=2),
    )
    assert isinstance(nixl_agents.there(agent, lambda: agent.connect(half)), ReadFailed)
    assert fake.log == ["release blocks of peer", "remove peer"]
    fake.fail.clear()
    assert nixl_agents.there(agent, lambda: agent.connect(half)) is None


def test_handles_that_nixl_will_not_release_stop_nothing(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    fake.fail.add("remove_remote_agent")
    ended = nixl_agents.start_read(agent)
    fake.posted[0].stubborn = True
    fake.posted[0].state = "DONE"
    assert ended.wait() is None
    agent.forget(nixl_agents.PEER)
    fake.wait_polls(2)


def test_the_thread_survives_a_command_and_a_poll_that_raise(made: Made) -> None:
    agent, fake = made

    def stumble() -> None:
        raise ZeroDivisionError

    assert agent.do(stumble)
    fake.fail.add("get_new_notifs")
    fake.wait_polls(3)
    fake.fail.clear()
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    fake.first_state = "DONE"
    assert nixl_agents.start_read(agent).wait() is None


def test_everything_runs_in_the_one_thread(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    nixl_agents.start_read(agent)
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
        hold.wait(nixl_agents.AGENT_S)

    agent.do(block)
    assert held.wait(nixl_agents.AGENT_S)
    taken = sum(agent.do(lambda: None) for _ in range(nixl_agent.MAX_COMMANDS + 10))
    hold.set()
    assert taken == nixl_agent.MAX_COMMANDS


def test_stopping_releases_everything_in_order(scripted: ScriptedAgent) -> None:
    agent = nixl_agents.opened_agent()
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    agent.stop()
    assert scripted.log == [
        "release blocks of peer",
        "remove peer",
        "release blocks of NIXL_INIT_AGENT",
        "deregister",
    ]


def test_stopping_during_a_read_leaves_the_memory_registered(
    scripted: ScriptedAgent,
) -> None:
    agent = nixl_agents.opened_agent()
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    ended = nixl_agents.start_read(agent)
    agent.stop()
    wait_until(lambda: not agent.alive)
    assert not ended.reported and not scripted.log  # never a guess that it has ended


def test_a_failing_start_is_raised_where_it_was_asked_for(scripted: ScriptedAgent) -> None:
    scripted.fail.add("register_memory")
    with pytest.raises(RuntimeError, match="register_memory"):
        nixl_agents.opened_agent()


def test_missing_bindings_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library, "_BINDINGS", ("no.such.module", "neither.this"))
    with pytest.raises(ConfigError, match="pip install"):
        load_bindings()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU alone")
def test_agents_of_a_mover_never_share_a_cpu_and_use_all(scripted: ScriptedAgent) -> None:
    agents = [
        NixlAgent(nixl_agents.nixl_pool(), "name", SegmentQueue(), (number, 2))
        for number in range(2)
    ]
    seen: list[set[int]] = []
    for agent in agents:
        nixl_agents.there(agent, lambda: seen.append(os.sched_getaffinity(0)))
        agent.stop()
    assert not seen[0] & seen[1] and seen[0] | seen[1] == os.sched_getaffinity(0)


def test_more_agents_than_cpus_are_bound_to_none(scripted: ScriptedAgent) -> None:
    cpus = os.sched_getaffinity(0)
    agent = NixlAgent(nixl_agents.nixl_pool(), "name", SegmentQueue(), (0, len(cpus) + 1))
    seen: list[set[int]] = []
    nixl_agents.there(agent, lambda: seen.append(os.sched_getaffinity(0)))
    agent.stop()
    assert seen == [cpus]
