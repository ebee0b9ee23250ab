"""From the wire to values: no integer and no number is trusted."""

from __future__ import annotations

import math

import pytest

from baton.proto import worker_pb2
from baton.runtime.errors import InvalidRequest
from baton.runtime.links import LINK_PROTOCOL_VERSION
from baton.runtime.sampling import MAX_LOGPROBS, SamplingParams
from baton.runtime.wire import MAX_BIAS, ModelLimits, check_tokens, sampling_params

VOCAB = 100


def message(**fields: object) -> worker_pb2.Sampling:
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0}
    return worker_pb2.Sampling(**{**neutral, **fields})


def test_neutral_values_come_through() -> None:
    assert sampling_params(message(), VOCAB) == SamplingParams(temperature=0.0)


def test_every_field_comes_through() -> None:
    params = sampling_params(
        message(
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.5,
            frequency_penalty=-0.5,
            presence_penalty=0.25,
            logit_bias={7: -2.0, 3: 1.0},
            seed=2**64 - 1,
            top_logprobs=0,
        ),
        VOCAB,
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        logit_bias=((3, 1.0), (7, -2.0)),
        seed=2**64 - 1,
        top_logprobs=0,
    )
    assert params.needs_history


def test_a_cut_beyond_the_vocabulary_cuts_nothing() -> None:
    assert sampling_params(message(top_k=2**32 - 1), VOCAB).top_k == VOCAB


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -1.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 1e9),
        ("presence_penalty", -math.inf),
        ("top_logprobs", MAX_LOGPROBS + 1),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_what_is_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(message(**{field: value}), VOCAB)
    assert caught.value.field == field


def test_a_bias_has_its_bound() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        sampling_params(message(logit_bias=dict.fromkeys(range(MAX_BIAS + 1), 1.0)), 10**6)


def test_tokens_are_held_against_the_vocabulary() -> None:
    check_tokens([], "prompt", VOCAB)
    check_tokens([0, VOCAB - 1], "prompt", VOCAB)
    with pytest.raises(InvalidRequest, match="prompt") as caught:
        check_tokens([0, VOCAB], "prompt", VOCAB)
    assert caught.value.field == "prompt"


def test_a_hello_tells_the_limits_and_whose_they_are() -> None:
    limits = ModelLimits(VOCAB, 10, "fingerprint", "float32", b"key", kv_terms="protocol 1")
    assert limits.hello("decode-3", b"boot", "decode", 16, 40) == worker_pb2.WorkerHello(
        protocol_version=LINK_PROTOCOL_VERSION,
        worker_id="decode-3",
        boot_id=b"boot",
        role="decode",
        model_fingerprint="fingerprint",
        kv_dtype="float32",
        block_size=16,
        max_context=10,
        total_blocks=40,
        vocab_size=VOCAB,
        kv_terms="protocol 1",
    )


def test_each_salt_has_a_root_of_its_own() -> None:
    limits = ModelLimits(VOCAB, 10, "fingerprint", "float32", b"key")
    roots = {limits.root(b""), limits.root(b"a"), limits.root(b"b")}
    assert len(roots) == 3
    other = ModelLimits(VOCAB, 10, "fingerprint", "bfloat16", b"key")
    assert other.root(b"") not in roots
