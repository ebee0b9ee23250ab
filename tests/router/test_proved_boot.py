"""A link is made under the boot that the handshake proved, whatever boot the record names.

A worker restarts at its address before the registry shows it: the record still names its last boot.
"""

from __future__ import annotations

import asyncio

from baton.proto import worker_pb2
from baton.router.fleet.circuits import STRIKES
from baton.runtime.registry import WorkerRecord
from tests.support.fleet_scene import FleetScene
from tests.support.link_scene import LinkScene
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

NAMED, PROVED = b"\x01" * 16, b"\x02" * 16  # by the record, by the handshake
BLOCK, OTHER_BLOCK = b"a" * 16, b"c" * 16


def begun(number: int, *, named_boot_fails: bool = False) -> FleetScene:
    """Return a fleet in which a record names boot 1 of decode-0, and boot `number` answers."""
    scene = FleetScene()
    scene.add("decode-1", 7)
    now_s = asyncio.get_running_loop().time()
    for _ in range(int(STRIKES) if named_boot_fails else 0):
        scene.fleet.circuits.record_failure(NAMED, now_s)
    scene.put("decode-0", "decode", number)
    record = WorkerRecord("decode-0", NAMED.hex(), "decode", "decode-0", "", "m", 1)
    scene.registry.announce(record)
    return scene


@on_virtual_time
async def test_the_circuit_of_the_named_boot_is_not_used() -> None:
    scene = begun(2, named_boot_fails=True)
    await eventually(lambda: scene.names() == ["decode-0", "decode-1"])
    assert {view.boot_id for view in scene.fleet.views()} == {PROVED, b"\x07" * 16}
    assert scene.fleet.passed_over() == frozenset()
    assert scene.fleet.link_of_boot(NAMED) is None
    await scene.end()


@on_virtual_time
async def test_a_failing_boot_that_is_proved_is_passed_over() -> None:
    """Show that the circuit of the test before counts where the handshake proves its boot."""
    scene = begun(1, named_boot_fails=True)
    await eventually(lambda: scene.names() == ["decode-0", "decode-1"])
    assert scene.fleet.passed_over() == {NAMED}
    await scene.end()


@on_virtual_time
async def test_blocks_of_the_named_boot_are_not_in_the_index() -> None:
    """They leave the index with the handshake, and no event of that boot puts them back."""
    made = LinkScene(link_grace_s=20.0)
    far = await made.accept()
    made.dialer.blocks.put_nowait(snapshot(made.boot_id, BLOCK))
    await eventually(lambda: made.index.workers_with(BLOCK) == ["decode-0"])
    await far.close()
    await made.accept(made.hello(boot_id=PROVED))
    assert made.link.boot_id == PROVED != bytes.fromhex(made.link.record.boot_id)
    assert made.index.workers_with(BLOCK) == []
    made.dialer.blocks.put_nowait(snapshot(made.boot_id, BLOCK))
    await asyncio.sleep(2.0)
    assert made.index.workers_with(BLOCK) == []
    made.dialer.blocks.put_nowait(snapshot(PROVED, OTHER_BLOCK))
    await eventually(lambda: made.index.workers_with(OTHER_BLOCK) == ["decode-0"])


def snapshot(boot_id: bytes, block: bytes) -> worker_pb2.BlockEvents:
    return worker_pb2.BlockEvents(boot_id=boot_id, snapshot=True, snapshot_end=True, stored=block)
