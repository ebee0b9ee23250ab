"""Block identities: the chain, and that every part of what they name changes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.identity import (
    IDENTITY_BYTES,
    chain,
    child,
    cluster_key,
    root,
    tenant_of,
    tenant_salt,
)

KEY = cluster_key("secret")
ROOT = root(KEY, "model", "bfloat16")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(TOKENS, st.integers(1, 20))
def test_a_chain_is_repeated_children_of_full_blocks(tokens: list[int], block_size: int) -> None:
    parent, wanted = ROOT, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = child(KEY, parent, tokens[start : start + block_size])
        wanted.append(parent)
    got = chain(KEY, ROOT, tokens, block_size)
    assert got == wanted
    assert len(got) == len(tokens) // block_size
    assert all(len(identity) == IDENTITY_BYTES for identity in got)


@given(TOKENS, st.integers(0, 69))
def test_one_other_token_changes_its_block_and_all_after_it(tokens: list[int], at: int) -> None:
    if at >= len(tokens) // 4 * 4:
        return
    other = list(tokens)
    other[at] ^= 1
    before, after = chain(KEY, ROOT, tokens, 4), chain(KEY, ROOT, other, 4)
    block = at // 4
    assert before[:block] == after[:block]
    assert all(one != two for one, two in zip(before[block:], after[block:], strict=True))


@given(*[st.binary(max_size=40)] * 4)
def test_a_tenants_salt_is_its_own(one: bytes, two: bytes, first: bytes, second: bytes) -> None:
    mine, other = tenant_salt(KEY, one, first), tenant_salt(KEY, two, second)
    assert (mine == other) == ((one, first) == (two, second))
    assert len(mine) == (2 * IDENTITY_BYTES if one or first else 0)
    assert (tenant_of(mine) == tenant_of(other)) == (one == two)
    assert not mine or mine != (foreign := tenant_salt(cluster_key("another"), one, first))
    assert not one or tenant_of(mine) != tenant_of(foreign)


def test_a_longer_prompt_keeps_the_identities_of_its_prefix() -> None:
    assert chain(KEY, ROOT, range(40), 16) == chain(KEY, ROOT, range(100), 16)[:2]


ROOTS = {
    "plain": root(KEY, "model", "bfloat16"),
    "another key": root(cluster_key("other"), "model", "bfloat16"),
    "another model": root(KEY, "model2", "bfloat16"),
    "another dtype": root(KEY, "model", "float32"),
    "an adapter": root(KEY, "model", "bfloat16", "lora"),
    "a salt": root(KEY, "model", "bfloat16", salt=b"tenant"),
    "another salt": root(KEY, "model", "bfloat16", salt=b"tenant2"),
    "moved border": root(KEY, "modelb", "float16"),
    "adapter as salt": root(KEY, "model", "bfloat16", salt=b"lora"),
}


def test_every_part_of_a_root_counts() -> None:
    assert len(set(ROOTS.values())) == len(ROOTS)
    blocks = {child(KEY, parent, range(16)) for parent in ROOTS.values()}
    assert len(blocks) == len(ROOTS)


def test_a_child_depends_on_the_key_and_the_order_of_tokens() -> None:
    assert child(KEY, ROOT, [1, 2]) != child(cluster_key("other"), ROOT, [1, 2])
    assert child(KEY, ROOT, [1, 2]) != child(KEY, ROOT, [2, 1])
    assert child(KEY, ROOT, [1, 0]) != child(KEY, ROOT, [1])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_32_bit_number_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(KEY, ROOT, [token] * 16, 16)


def test_identities_stay_as_they_are() -> None:
    """They cross processes of different versions: a change is a change of protocol."""
    assert chain(KEY, ROOT, range(32), 16)[1].hex() == "25b475c09338cc28ef99db5574f5f492"
