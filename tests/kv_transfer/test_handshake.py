"""The handshake names every difference, and describes a pool without loss."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from baton.kv_transfer import handshake
from baton.kv_transfer.block_sizes import BlockRatio
from baton.kv_transfer.mover import PeerPool
from baton.proto import handoff_pb2
from baton.proto.handoff_pb2 import HandshakeMessage
from baton.runtime.errors import Incompatible
from baton.runtime.settings.checks import declared_settings

VERSIONS = {"nixl": "1.5.1", "ucx": "1.23.0"}
POOL = PeerPool(b"b" * 16, "nixl", b"meta", 1 << 40, 4096, 100, 1, "VRAM", VERSIONS, kv_heads=8)


def hello(pool: PeerPool = POOL, **changes: object) -> HandshakeMessage:
    common = handshake.compatibility(
        "model-a", "bfloat16", block_size=16, layers=4, kv_heads=8, head_dim=64
    )
    for name, value in changes.items():
        setattr(common, name, value)
    return handshake.build("worker-1", pool, common)


def test_equal_pools_fit_and_the_pool_survives_the_wire() -> None:
    theirs = HandshakeMessage.FromString(hello().SerializeToString())
    handshake.check(hello(), theirs)
    assert handshake.peer_pool(theirs) == POOL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", 99),
        ("model_fingerprint", "model-b"),
        ("kv_dtype", "float32"),
        ("kv_dtype", "int8 of bfloat16"),
        ("block_size", 32),
        ("layout_version", 7),
        ("checksum_algorithm", "crc32"),
        ("layers", 5),
        ("kv_heads", 4),
        ("head_dim", 128),
        ("verify", False),
        ("draft_fingerprint", "draft-b"),
        ("deterministic_split", "tp 2 ep 2"),
    ],
)
def test_each_difference_is_named_with_both_values(field: str, value: int | str) -> None:
    mine, theirs = hello(), hello(**{field: value})
    with pytest.raises(Incompatible) as caught:
        handshake.check(mine, theirs)
    here, there = getattr(mine.compatibility, field), getattr(theirs.compatibility, field)
    assert f"{field} {here!r} here, {there!r} there" in str(caught.value)
    routers_know = field in ("model_fingerprint", "kv_dtype", "block_size")
    assert (handshake.terms(mine) == handshake.terms(theirs)) == routers_know


def test_terms_are_equal_where_workers_fit_and_only_there() -> None:
    """A router compares them before any handshake: what may differ is not in them."""
    apart = hello(tp_size=2, tp_rank=1, bridges_sizes=True)
    apart.compatibility.bridged_dtypes.append("int8 of bfloat16")
    assert handshake.terms(apart) == handshake.terms(hello())
    for pool in (replace(POOL, mover="other"), replace(POOL, versions={"nixl": "0"})):
        assert handshake.terms(hello(pool)) != handshake.terms(hello())


def test_a_refusal_names_both_workers() -> None:
    theirs = hello(kv_dtype="float32")
    theirs.worker_id = "prefill-0"
    with pytest.raises(
        Incompatible, match="prefill-0 .there. does not fit worker worker-1 .here.: k"
    ):
        handshake.check(hello(), theirs)


@pytest.mark.parametrize("library", ["nixl", "ucx"])
def test_handshake_names_another_version_of_a_library(library: str) -> None:
    other = hello(dataclasses.replace(POOL, versions=VERSIONS | {library: "0.9"}))
    with pytest.raises(Incompatible) as caught:
        handshake.check(hello(), other)
    expected = f"{library} version {VERSIONS[library]!r} here, '0.9' there"
    assert expected in str(caught.value)


def test_memory_of_another_kind_fits() -> None:
    host = dataclasses.replace(POOL, memory="DRAM", device_id=0)
    handshake.check(hello(), hello(host))
    handshake.check(hello(host), hello())


def test_an_unknown_kind_of_memory_is_refused() -> None:
    with pytest.raises(Incompatible, match="'TAPE'; only DRAM and VRAM are supported"):
        handshake.peer_pool(hello(dataclasses.replace(POOL, memory="TAPE")))


def test_all_differences_are_named_at_once() -> None:
    other = hello(dataclasses.replace(POOL, mover="memory"), kv_dtype="float32", layers=9)
    with pytest.raises(Incompatible, match="kv_dtype.*layers.*mover"):
        handshake.check(hello(), other)


def test_every_field_of_the_contract_is_compared_but_the_split() -> None:
    fields = {field.name for field in handoff_pb2.Compatibility.DESCRIPTOR.fields}
    assert fields >= {"tp_size", "tp_rank"}
    handshake.check(hello(), hello(tp_rank=3))
    wider = hello(dataclasses.replace(POOL, block_bytes=2048), tp_size=2)
    handshake.check(hello(), wider)  # half the heads, half the bytes


def test_equal_splits_need_equal_blocks() -> None:
    with pytest.raises(Incompatible, match="block_bytes 4096 here, 2048 there"):
        handshake.check(hello(), hello(dataclasses.replace(POOL, block_bytes=2048)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"boot_id": b"short"}, "boot id of 5 bytes"),
        ({"num_blocks": 0}, "empty pool"),
        ({"block_bytes": 0}, "empty pool"),
        ({"base_address": (1 << 64) - 5}, "64-bit"),
        ({"num_blocks": (1 << 24) + 1}, "16777217 blocks"),
        ({"metadata": bytes((1 << 20) + 1)}, "1048577 bytes"),
    ],
)
def test_what_cannot_be_a_pool_is_refused(changes: dict[str, int | bytes], says: str) -> None:
    theirs = hello(dataclasses.replace(POOL, **changes))
    with pytest.raises(Incompatible, match=says):
        handshake.peer_pool(theirs)


def test_blocks_of_more_tokens_than_a_setting_allows_are_refused() -> None:
    """A READ would be cut into as many pieces as the own blocks that hold one."""
    assert declared_settings()["pool.block_size"].high == handshake.MAX_BLOCK_TOKENS == 256
    handshake.peer_pool(of_size(256))
    with pytest.raises(Incompatible, match="worker-1 describes blocks of 512 tokens"):
        handshake.peer_pool(of_size(512))


def of_dtype(kv_dtype: str, bridged: list[str], block_bytes: int) -> HandshakeMessage:
    made = hello(dataclasses.replace(POOL, block_bytes=block_bytes), kv_dtype=kv_dtype)
    made.compatibility.bridged_dtypes.extend(bridged)
    return made


PLAIN = of_dtype("bfloat16", ["int8 of bfloat16"], 4096)
NARROW = of_dtype("int8 of bfloat16", ["bfloat16"], 2112)


@pytest.mark.parametrize(("mine", "theirs"), [(PLAIN, NARROW), (NARROW, PLAIN)])
def test_dtypes_that_both_sides_bridge_fit(
    mine: HandshakeMessage, theirs: HandshakeMessage
) -> None:
    handshake.check(mine, theirs)
    pool = handshake.bridged_pool(mine, theirs)
    assert pool.kv_dtype == theirs.compatibility.kv_dtype
    assert pool.block_bytes == theirs.pool.block_bytes
    assert pool.unit_bytes == mine.pool.block_bytes  # what travels is what the reader stores
    assert handshake.bridged_pool(mine, mine) == handshake.peer_pool(mine)


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (PLAIN, of_dtype("int8 of bfloat16", [], 2112), "to int8 of bfloat16 here, to nothing"),
        (of_dtype("bfloat16", [], 4096), NARROW, "to nothing here, to bfloat16 there"),
        (NARROW, of_dtype("fp8_e4m3 of bfloat16", ["bfloat16"], 2112), "to bfloat16 here, to bfl"),
        (PLAIN, of_dtype("int8 of float32", ["float32"], 2112), "here, to float32 there"),
    ],
)
def test_dtypes_that_are_not_bridged_are_named(
    mine: HandshakeMessage, theirs: HandshakeMessage, said: str
) -> None:
    with pytest.raises(Incompatible) as caught:
        handshake.check(mine, theirs)
    dtypes = mine.compatibility.kv_dtype, theirs.compatibility.kv_dtype
    assert f"kv_dtype {dtypes[0]!r} here, {dtypes[1]!r} there" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("mine", "kv_dtype", "most"), [(PLAIN, "int8 of bfloat16", 2), (NARROW, "bfloat16", 1)]
)
def test_blocks_too_small_for_their_dtype_are_refused(
    mine: HandshakeMessage, kv_dtype: str, most: int
) -> None:
    """A READ would be cut into as many pieces as such blocks are."""
    here, own = mine.compatibility.kv_dtype, mine.pool.block_bytes
    least = own // most
    bridged = handshake.bridged_pool(mine, of_dtype(kv_dtype, [here], least))
    assert len(bridged.shape(own).cuts) == most
    named = f"{own} of '{here}' here take more than {most} of {least - 1} of '{kv_dtype}' there"
    with pytest.raises(Incompatible, match=named):
        handshake.bridged_pool(mine, of_dtype(kv_dtype, [here], least - 1))


def test_a_bridged_dtype_excuses_no_other_difference() -> None:
    other = of_dtype("int8 of bfloat16", ["bfloat16"], 2112)
    other.compatibility.head_dim = 128
    with pytest.raises(Incompatible, match="head_dim 64 here, 128 there$"):
        handshake.check(PLAIN, other)


def of_size(block_size: int, *, bridges: bool = True) -> HandshakeMessage:
    pool = dataclasses.replace(POOL, block_bytes=256 * block_size)
    return hello(pool, block_size=block_size, bridges_sizes=bridges)


@pytest.mark.parametrize(("here", "there"), [(16, 32), (32, 16), (16, 64), (64, 16)])
def test_sizes_of_which_one_divides_the_other_fit(here: int, there: int) -> None:
    mine, theirs = of_size(here), of_size(there)
    handshake.check(mine, theirs)
    pool = handshake.bridged_pool(mine, theirs)
    assert (pool.block_size, pool.kv_dtype, pool.unit_bytes) == (there, None, 256 * there)
    assert pool.ratio == BlockRatio(max(1, there // here), max(1, here // there))
    assert len(pool.shape(256 * here).cuts) == max(1, there // here)  # descriptors of a block


def test_unlike_sizes_and_dtypes_fit_at_once() -> None:
    """What travels is a block of the granter's size in the reader's dtype."""
    mine, theirs = of_size(32), of_dtype("int8 of bfloat16", ["bfloat16"], 2112)
    mine.compatibility.bridged_dtypes.append("int8 of bfloat16")
    theirs.compatibility.bridges_sizes = True
    handshake.check(mine, theirs)
    pool = handshake.bridged_pool(mine, theirs)
    assert (pool.block_size, pool.kv_dtype) == (16, "int8 of bfloat16")
    assert (pool.unit_bytes, pool.ratio) == (4096, BlockRatio(joined=2))
    assert len(pool.shape(mine.pool.block_bytes).cuts) == 2


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (
            of_size(16),
            of_size(24),
            "block_size 16 here, 24 there (neither divides the other: set pool.block_size of both "
            "workers to the same, or so that one divides the other)",
        ),
        (
            of_size(16),
            of_size(32, bridges=False),
            "block_size 16 here, 32 there (KV of other sizes is not exchanged there: set "
            "pool.block_size of both workers to the same)",
        ),
        (of_size(16, bridges=False), of_size(32), "not exchanged here: set"),
        (of_size(16, bridges=False), of_size(24, bridges=False), "here and there: set"),
    ],
)
def test_sizes_that_are_not_bridged_are_named(
    mine: HandshakeMessage, theirs: HandshakeMessage, said: str
) -> None:
    with pytest.raises(Incompatible) as caught:
        handshake.check(mine, theirs)
    assert said in str(caught.value)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_blocks_of_unlike_sizes_hold_as_many_bytes_a_token(tp_size: int) -> None:
    other = of_size(32)
    other.pool.block_bytes, other.compatibility.tp_size = 7936, tp_size
    with pytest.raises(Incompatible, match="block_bytes 8192 here, 7936 there"):
        handshake.check(of_size(16), other)
