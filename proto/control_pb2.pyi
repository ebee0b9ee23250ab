from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerBoot(_message.Message):
    __slots__ = ("worker_id", "boot_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot_id: bytes
    def __init__(self, worker_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerBoot
    def __init__(self, worker: _Optional[_Union[WorkerBoot, _Mapping]] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChangeRoleRequest(_message.Message):
    __slots__ = ("worker", "role", "term")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerBoot
    role: str
    term: int
    def __init__(self, worker: _Optional[_Union[WorkerBoot, _Mapping]] = ..., role: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class ChangeRoleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("worker", "term")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerBoot
    term: int
    def __init__(self, worker: _Optional[_Union[WorkerBoot, _Mapping]] = ..., term: _Optional[int] = ...) -> None: ...

class LinkedRouter(_message.Message):
    __slots__ = ("router_id", "host", "waiting", "refused")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    host: str
    waiting: int
    refused: int
    def __init__(self, router_id: _Optional[str] = ..., host: _Optional[str] = ..., waiting: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "up_s", "audit", "routers", "not_ready_reason")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    version: str
    up_s: float
    audit: bytes
    routers: _containers.RepeatedCompositeFieldContainer[LinkedRouter]
    not_ready_reason: str
    def __init__(self, version: _Optional[str] = ..., up_s: _Optional[float] = ..., audit: _Optional[bytes] = ..., routers: _Optional[_Iterable[_Union[LinkedRouter, _Mapping]]] = ..., not_ready_reason: _Optional[str] = ...) -> None: ...
