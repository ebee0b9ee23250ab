"""The benchmark of TLS on a token's way: both ways are measured, and the figures add up."""

from __future__ import annotations

from benchmarks import tls_stream


def test_both_ways_are_measured() -> None:
    found = {figure.name: figure.value for figure in tls_stream.figures_of(rounds=2, count=3)}
    for sequences in (1, 64):
        tls, plain = (found[f"trip_us_{sequences}_{way}"] for way in ("tls", "plain"))
        assert tls > 0 and plain > 0
        assert found[f"trip_us_{sequences}_added"] == tls - plain
        assert found[f"cpu_us_{sequences}_tls"] > 0
    assert found["first_answer_tls_ms"] > 0 and found["first_answer_plain_ms"] > 0


def test_a_steps_outputs_are_as_large_as_its_sequences() -> None:
    one, many = (len(tls_stream.outputs(count)) for count in (1, 64))
    assert 30 < one < 80 and 60 * one < many < 70 * one
