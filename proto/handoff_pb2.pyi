from baton.proto import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeMessage(_message.Message):
    __slots__ = ("worker_id", "boot_id", "compatibility", "pool", "host", "probe_after_ms", "read_gb_per_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROBE_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    READ_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot_id: bytes
    compatibility: Compatibility
    pool: PoolDescription
    host: str
    probe_after_ms: int
    read_gb_per_s: float
    def __init__(self, worker_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., compatibility: _Optional[_Union[Compatibility, _Mapping]] = ..., pool: _Optional[_Union[PoolDescription, _Mapping]] = ..., host: _Optional[str] = ..., probe_after_ms: _Optional[int] = ..., read_gb_per_s: _Optional[float] = ...) -> None: ...

class Compatibility(_message.Message):
    __slots__ = ("protocol_version", "model_fingerprint", "kv_dtype", "block_size", "layout_version", "checksum_algorithm", "layers", "kv_heads", "head_dim", "tp_size", "tp_rank", "verify", "draft_fingerprint", "deterministic_split", "bridged_dtypes", "bridges_sizes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_SPLIT_FIELD_NUMBER: _ClassVar[int]
    BRIDGED_DTYPES_FIELD_NUMBER: _ClassVar[int]
    BRIDGES_SIZES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_fingerprint: str
    kv_dtype: str
    block_size: int
    layout_version: int
    checksum_algorithm: str
    layers: int
    kv_heads: int
    head_dim: int
    tp_size: int
    tp_rank: int
    verify: bool
    draft_fingerprint: str
    deterministic_split: str
    bridged_dtypes: _containers.RepeatedScalarFieldContainer[str]
    bridges_sizes: bool
    def __init__(self, protocol_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., layout_version: _Optional[int] = ..., checksum_algorithm: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., verify: _Optional[bool] = ..., draft_fingerprint: _Optional[str] = ..., deterministic_split: _Optional[str] = ..., bridged_dtypes: _Optional[_Iterable[str]] = ..., bridges_sizes: _Optional[bool] = ...) -> None: ...

class PoolDescription(_message.Message):
    __slots__ = ("mover", "metadata", "base_address", "block_bytes", "num_blocks", "device_id", "memory", "versions", "rank_pools")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MOVER_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RANK_POOLS_FIELD_NUMBER: _ClassVar[int]
    mover: str
    metadata: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int
    memory: str
    versions: _containers.ScalarMap[str, str]
    rank_pools: _containers.RepeatedCompositeFieldContainer[RankPoolDescription]
    def __init__(self, mover: _Optional[str] = ..., metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., device_id: _Optional[int] = ..., memory: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., rank_pools: _Optional[_Iterable[_Union[RankPoolDescription, _Mapping]]] = ...) -> None: ...

class RankPoolDescription(_message.Message):
    __slots__ = ("address", "block_bytes", "device_id")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    address: int
    block_bytes: int
    device_id: int
    def __init__(self, address: _Optional[int] = ..., block_bytes: _Optional[int] = ..., device_id: _Optional[int] = ...) -> None: ...

class ReaderMessage(_message.Message):
    __slots__ = ("open", "renew", "closed")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    open: OpenHandoff
    renew: Renew
    closed: Closed
    def __init__(self, open: _Optional[_Union[OpenHandoff, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ...) -> None: ...

class GranterMessage(_message.Message):
    __slots__ = ("opened", "acknowledged", "offer", "checksums", "first_tokens", "failed", "held")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    acknowledged: Acknowledged
    offer: Offer
    checksums: Checksums
    first_tokens: FirstTokens
    failed: _worker_pb2.Failure
    held: Held
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., checksums: _Optional[_Union[Checksums, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., failed: _Optional[_Union[_worker_pb2.Failure, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ...) -> None: ...

class OpenHandoff(_message.Message):
    __slots__ = ("handoff_id", "granter_boot_id", "reader_boot_id", "request_id", "attempt", "tokens", "prompt_tokens", "held_blocks", "sampling", "choices", "cache_salt", "trace_context", "lease_ms", "deadline_ms", "cached_only", "source", "kv_dtype")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    READER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_ONLY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    granter_boot_id: bytes
    reader_boot_id: bytes
    request_id: str
    attempt: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    held_blocks: int
    sampling: _worker_pb2.Sampling
    choices: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    trace_context: _containers.ScalarMap[str, str]
    lease_ms: int
    deadline_ms: int
    cached_only: bool
    source: _worker_pb2.Source
    kv_dtype: str
    def __init__(self, handoff_id: _Optional[bytes] = ..., granter_boot_id: _Optional[bytes] = ..., reader_boot_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., held_blocks: _Optional[int] = ..., sampling: _Optional[_Union[_worker_pb2.Sampling, _Mapping]] = ..., choices: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., lease_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., cached_only: _Optional[bool] = ..., source: _Optional[_Union[_worker_pb2.Source, _Mapping]] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: int
    def __init__(self, n: _Optional[int] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Opened(_message.Message):
    __slots__ = ("lease_ms",)
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    def __init__(self, lease_ms: _Optional[int] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: int
    def __init__(self, n: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("first", "blocks", "partial_tokens")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    partial_tokens: int
    def __init__(self, first: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., partial_tokens: _Optional[int] = ...) -> None: ...

class Checksums(_message.Message):
    __slots__ = ("first", "checksums")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    first: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "cached_tokens", "prompt_logprobs", "timeline")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    cached_tokens: int
    prompt_logprobs: _worker_pb2.PromptLogprobs
    timeline: _worker_pb2.Timeline
    def __init__(self, tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_worker_pb2.PromptLogprobs, _Mapping]] = ..., timeline: _Optional[_Union[_worker_pb2.Timeline, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token", "logprob", "top")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TopLogprob]
    def __init__(self, choice: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_worker_pb2.TopLogprob, _Mapping]]] = ...) -> None: ...
