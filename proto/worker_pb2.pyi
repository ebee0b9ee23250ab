from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_ENDED: _ClassVar[EndReason]
    STOP: _ClassVar[EndReason]
    LENGTH: _ClassVar[EndReason]
    CANCELLED: _ClassVar[EndReason]
    FAILED: _ClassVar[EndReason]

class PhaseName(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN_PHASE: _ClassVar[PhaseName]
    CREDIT_WAIT: _ClassVar[PhaseName]
    CONNECT: _ClassVar[PhaseName]
    OPEN: _ClassVar[PhaseName]
    PREFILL_QUEUE: _ClassVar[PhaseName]
    STEP_WAIT: _ClassVar[PhaseName]
    CHUNK: _ClassVar[PhaseName]
    FIRST_TOKEN: _ClassVar[PhaseName]
    LOST_HANDOFF: _ClassVar[PhaseName]
    FETCH: _ClassVar[PhaseName]
    VERIFY: _ClassVar[PhaseName]
    DECODE_QUEUE: _ClassVar[PhaseName]
    STEP: _ClassVar[PhaseName]
    DECODE: _ClassVar[PhaseName]
    CACHED_READ: _ClassVar[PhaseName]
NOT_ENDED: EndReason
STOP: EndReason
LENGTH: EndReason
CANCELLED: EndReason
FAILED: EndReason
UNKNOWN_PHASE: PhaseName
CREDIT_WAIT: PhaseName
CONNECT: PhaseName
OPEN: PhaseName
PREFILL_QUEUE: PhaseName
STEP_WAIT: PhaseName
CHUNK: PhaseName
FIRST_TOKEN: PhaseName
LOST_HANDOFF: PhaseName
FETCH: PhaseName
VERIFY: PhaseName
DECODE_QUEUE: PhaseName
STEP: PhaseName
DECODE: PhaseName
CACHED_READ: PhaseName

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "settled", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    settled: Settled
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "outputs", "load", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    outputs: StepOutputs
    load: Load
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("unplaced",)
    UNPLACED_FIELD_NUMBER: _ClassVar[int]
    unplaced: UnplacedRequests
    def __init__(self, unplaced: _Optional[_Union[UnplacedRequests, _Mapping]] = ...) -> None: ...

class UnplacedRequests(_message.Message):
    __slots__ = ("waiting", "refused")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    refused: int
    def __init__(self, waiting: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "boot_id", "resume", "protocol_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    boot_id: bytes
    resume: _containers.RepeatedCompositeFieldContainer[Resume]
    protocol_version: int
    def __init__(self, router_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., resume: _Optional[_Iterable[_Union[Resume, _Mapping]]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("request_id", "attempt", "next")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    next: _containers.RepeatedCompositeFieldContainer[ChoiceIndex]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., next: _Optional[_Iterable[_Union[ChoiceIndex, _Mapping]]] = ...) -> None: ...

class ChoiceIndex(_message.Message):
    __slots__ = ("choice", "index")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    choice: int
    index: int
    def __init__(self, choice: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "boot_id", "role", "model_fingerprint", "kv_dtype", "block_size", "max_context", "total_blocks", "vocab_size", "protocol_version", "vocabulary", "step_tokens", "chunk_tokens", "topology", "kv_terms", "unknown_requests")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    KV_TERMS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot_id: bytes
    role: str
    model_fingerprint: str
    kv_dtype: str
    block_size: int
    max_context: int
    total_blocks: int
    vocab_size: int
    protocol_version: int
    vocabulary: bytes
    step_tokens: int
    chunk_tokens: int
    topology: str
    kv_terms: str
    unknown_requests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., role: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., max_context: _Optional[int] = ..., total_blocks: _Optional[int] = ..., vocab_size: _Optional[int] = ..., protocol_version: _Optional[int] = ..., vocabulary: _Optional[bytes] = ..., step_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., topology: _Optional[str] = ..., kv_terms: _Optional[str] = ..., unknown_requests: _Optional[_Iterable[str]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt", "choices", "sampling", "max_tokens", "stop_token_ids", "placement", "cache_salt", "trace_context", "deadline_ms", "alone")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    placement: Placement
    cache_salt: bytes
    trace_context: _containers.ScalarMap[str, str]
    deadline_ms: int
    alone: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., deadline_ms: _Optional[int] = ..., alone: _Optional[bool] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("choice", "accepted")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("local", "candidates", "source")
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    local: bool
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    source: Source
    def __init__(self, local: _Optional[bool] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., source: _Optional[_Union[Source, _Mapping]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "boot_id", "address", "block_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot_id: bytes
    address: str
    block_size: int
    def __init__(self, worker_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., address: _Optional[str] = ..., block_size: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker", "blocks", "kv_dtype")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    worker: Candidate
    blocks: int
    kv_dtype: str
    def __init__(self, worker: _Optional[_Union[Candidate, _Mapping]] = ..., blocks: _Optional[int] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "top_logprobs", "min_tokens", "barred", "prompt_logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    top_logprobs: int
    min_tokens: int
    barred: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., barred: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("text", "vocabulary", "reasoning")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    text: str
    vocabulary: bytes
    reasoning: Reasoning
    def __init__(self, text: _Optional[str] = ..., vocabulary: _Optional[bytes] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("opening", "closing", "opened")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    opening: int
    closing: int
    opened: bool
    def __init__(self, opening: _Optional[int] = ..., closing: _Optional[int] = ..., opened: _Optional[bool] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "ranks", "top_tokens", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("request_ids", "accepted")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    accepted: _containers.RepeatedCompositeFieldContainer[Resume]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., accepted: _Optional[_Iterable[_Union[Resume, _Mapping]]] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "prefill_switches")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    prefill_switches: _containers.RepeatedCompositeFieldContainer[PrefillSwitch]
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., prefill_switches: _Optional[_Iterable[_Union[PrefillSwitch, _Mapping]]] = ...) -> None: ...

class PrefillSwitch(_message.Message):
    __slots__ = ("request_id", "attempt", "prefill_boot_id", "failed_boot_ids", "output_received")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_BOOT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prefill_boot_id: bytes
    failed_boot_ids: _containers.RepeatedScalarFieldContainer[bytes]
    output_received: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prefill_boot_id: _Optional[bytes] = ..., failed_boot_ids: _Optional[_Iterable[bytes]] = ..., output_received: _Optional[bool] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "index", "token", "logprob", "top", "end", "failure", "cached_tokens", "prompt_logprobs", "accepted_proposal", "rejected_proposals", "timeline")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    index: int
    token: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    end: EndReason
    failure: Failure
    cached_tokens: int
    prompt_logprobs: PromptLogprobs
    accepted_proposal: bool
    rejected_proposals: int
    timeline: Timeline
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., index: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., end: _Optional[_Union[EndReason, str]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., accepted_proposal: _Optional[bool] = ..., rejected_proposals: _Optional[int] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("names", "micros", "counts", "peer_first", "peer_end", "peer", "fetch", "preempted")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MICROS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIRST_FIELD_NUMBER: _ClassVar[int]
    PEER_END_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[PhaseName]
    micros: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    peer_first: int
    peer_end: int
    peer: str
    fetch: FetchTimes
    preempted: bool
    def __init__(self, names: _Optional[_Iterable[_Union[PhaseName, str]]] = ..., micros: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., peer_first: _Optional[int] = ..., peer_end: _Optional[int] = ..., peer: _Optional[str] = ..., fetch: _Optional[_Union[FetchTimes, _Mapping]] = ..., preempted: _Optional[bool] = ...) -> None: ...

class FetchTimes(_message.Message):
    __slots__ = ("begin_us", "landed_us", "verified_us", "blocks", "bytes", "reads", "transport")
    BEGIN_US_FIELD_NUMBER: _ClassVar[int]
    LANDED_US_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_US_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    begin_us: _containers.RepeatedScalarFieldContainer[int]
    landed_us: _containers.RepeatedScalarFieldContainer[int]
    verified_us: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    reads: int
    transport: str
    def __init__(self, begin_us: _Optional[_Iterable[int]] = ..., landed_us: _Optional[_Iterable[int]] = ..., verified_us: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., reads: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "detail", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    detail: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., detail: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "total_blocks", "queued_tokens", "fetching", "draining", "step_ms", "promised_blocks", "overdue_ms", "not_ready_reason", "completed_requests", "open_requests", "active_requests", "overdue_requests", "degraded_peers", "pool", "queued_pairs", "waiting_blocks", "chunk_step", "decode_step")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_MS_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_PEERS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    WAITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STEP_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    queued_tokens: int
    fetching: int
    draining: bool
    step_ms: float
    promised_blocks: int
    overdue_ms: int
    not_ready_reason: str
    completed_requests: int
    open_requests: int
    active_requests: int
    overdue_requests: _containers.RepeatedScalarFieldContainer[str]
    degraded_peers: _containers.RepeatedCompositeFieldContainer[DegradedPeer]
    pool: PoolBlocks
    queued_pairs: int
    waiting_blocks: int
    chunk_step: StepTime
    decode_step: StepTime
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., fetching: _Optional[int] = ..., draining: _Optional[bool] = ..., step_ms: _Optional[float] = ..., promised_blocks: _Optional[int] = ..., overdue_ms: _Optional[int] = ..., not_ready_reason: _Optional[str] = ..., completed_requests: _Optional[int] = ..., open_requests: _Optional[int] = ..., active_requests: _Optional[int] = ..., overdue_requests: _Optional[_Iterable[str]] = ..., degraded_peers: _Optional[_Iterable[_Union[DegradedPeer, _Mapping]]] = ..., pool: _Optional[_Union[PoolBlocks, _Mapping]] = ..., queued_pairs: _Optional[int] = ..., waiting_blocks: _Optional[int] = ..., chunk_step: _Optional[_Union[StepTime, _Mapping]] = ..., decode_step: _Optional[_Union[StepTime, _Mapping]] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("number", "prompt_tokens", "pairs", "sequences", "context_tokens", "micros")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICROS_FIELD_NUMBER: _ClassVar[int]
    number: int
    prompt_tokens: int
    pairs: int
    sequences: int
    context_tokens: int
    micros: int
    def __init__(self, number: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., pairs: _Optional[int] = ..., sequences: _Optional[int] = ..., context_tokens: _Optional[int] = ..., micros: _Optional[int] = ...) -> None: ...

class PoolBlocks(_message.Message):
    __slots__ = ("total", "free", "cached", "used", "leased", "pinned", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    used: int
    leased: int
    pinned: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., used: _Optional[int] = ..., leased: _Optional[int] = ..., pinned: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class DegradedPeer(_message.Message):
    __slots__ = ("worker_id", "boot_id", "gb_per_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot_id: bytes
    gb_per_s: float
    def __init__(self, worker_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., gb_per_s: _Optional[float] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("boot_id", "sequence", "snapshot", "snapshot_end", "stored", "removed")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    sequence: int
    snapshot: bool
    snapshot_end: bool
    stored: bytes
    removed: bytes
    def __init__(self, boot_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., snapshot_end: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...
