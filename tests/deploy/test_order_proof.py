"""The proof of an order: another one for every worker, boot, order and cluster."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.deploy.processes.order_proof import PROOF_BYTES, order_proof

PARTS = st.tuples(*[st.text("ab/é", max_size=4)] * 4)


@given(PARTS, PARTS)
def test_another_worker_boot_order_or_token_has_another_proof(
    one: tuple[str, str, str, str], other: tuple[str, str, str, str]
) -> None:
    assert (order_proof(*one) == order_proof(*other)) == (one == other)


def test_a_proof_is_hexadecimal_and_shows_nothing_of_the_token() -> None:
    proof = order_proof("secret", "decode-0", "ab" * 16, "/drain")
    assert len(bytes.fromhex(proof)) == PROOF_BYTES
    assert "secret" not in proof and b"secret" not in bytes.fromhex(proof)
