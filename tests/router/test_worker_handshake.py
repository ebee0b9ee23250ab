"""What a worker says of itself: each field that cannot be true is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.proto import worker_pb2
from baton.router.fleet.worker_view import MAX_VALUES, handshake_fault
from baton.runtime.config import Config, PoolConfig, StepConfig, WorkerConfig
from baton.runtime.errors import ConfigError
from baton.runtime.settings.checks import validate
from baton.runtime.wire import ModelLimits

VOCABULARY = 300


def hello(**fields: object) -> worker_pb2.WorkerHello:
    limits = ModelLimits(VOCABULARY, 4096, "f" * 32, "float32", b"key")
    made = limits.hello("decode-0", b"b" * 16, "decode", block_size=16, total_blocks=10)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_valid_hello_of_a_worker_is_accepted() -> None:
    assert handshake_fault(hello(), VOCABULARY) is None
    assert handshake_fault(hello(**MAX_VALUES), VOCABULARY) is None
    assert handshake_fault(hello(**dict.fromkeys(MAX_VALUES, 1)), VOCABULARY) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("protocol_version", 0, "protocol_version is 0, this router's is 1"),
        ("boot_id", b"", "boot_id has 0 bytes, not 16"),
        ("boot_id", b"b" * 17, "boot_id has 17 bytes"),
        ("block_size", 0, "block_size is 0, not from 1 to 256"),
        ("block_size", 257, "block_size is 257"),
        ("max_context", 0, "max_context is 0"),
        ("max_context", (1 << 24) + 1, "max_context is 16777217"),
        ("total_blocks", 0, "total_blocks is 0"),
        ("total_blocks", (1 << 32) - 1, "total_blocks is 4294967295"),
        ("model_fingerprint", "", "model_fingerprint has 0 characters"),
        ("kv_dtype", "d" * 257, "kv_dtype has 257 characters"),
        ("topology", "t" * 257, "topology has 257 characters, not at most 256"),
        ("kv_terms", "k" * 1025, "kv_terms has 1025 characters, not at most 1024"),
        ("vocab_size", 0, "vocab_size is 0, this router's model has 300"),
        ("vocab_size", 301, "vocab_size is 301, this router's model has 300"),
    ],
)
def test_what_cannot_be_true_is_named(name: str, value: int | str, said: str) -> None:
    assert said in handshake_fault(hello(**{name: value}), VOCABULARY)


def test_every_worker_that_may_be_started_may_be_linked() -> None:
    def with_sizes(more: int) -> list[Config]:
        size = MAX_VALUES["block_size"] + more
        pool, step = PoolConfig(block_size=size), StepConfig(chunk_tokens=size)
        return [
            replace(Config(), pool=pool, step=step),
            replace(Config(), pool=PoolConfig(blocks=MAX_VALUES["total_blocks"] + more)),
            replace(Config(), worker=WorkerConfig(max_context=MAX_VALUES["max_context"] + more)),
        ]

    for config in with_sizes(0):
        validate(config)
    for config in with_sizes(1):
        with pytest.raises(ConfigError):
            validate(config)
