from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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
    __slots__ = ("worker", "role")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerBoot
    role: str
    def __init__(self, worker: _Optional[_Union[WorkerBoot, _Mapping]] = ..., role: _Optional[str] = ...) -> None: ...

class ChangeRoleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
