"""What a flag of the command line may be, and the default that its help tells.

argparse names the flag in front of what is said here, and ends the process with exit code 2.
Keeps no state.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from baton.runtime.config import Config
from baton.runtime.errors import ConfigError

MOST_WORKERS = 64  # of one role, on one host
FLAG_SETTINGS = {  # option -> setting, for the options that are settings
    "host": "router.host",
    "port": "router.port",
    "grpc_port": "router.grpc_port",
    "placement": "router.placement",
    "device": "worker.device",
    "dtype": "worker.dtype",
    "blocks": "pool.blocks",
    "quantization": "worker.quantization",
    "kv_dtype": "pool.kv_dtype",
    "deterministic": "worker.deterministic",
}
SETTINGS_TOLD = (  # option, what stands for its value, what it is
    ("--host", "HOST", "the router's address"),
    ("--port", "PORT", "the router's port; 0: the system gives one"),
    ("--grpc-port", "PORT", "serve gRPC clients too; 0: the system gives one; -1: do not"),
    ("--placement", "{auto,disaggregated,local}", "who computes prompts"),
    ("--device", "{auto,cpu,cuda,cuda:N}", "where workers compute"),
    ("--dtype", "{auto,float32,bfloat16,float16}", "the kind of number; auto: the model's"),
    ("--quantization", "{none,int8,int4}", "make smaller weights of plain ones at load"),
    ("--kv-dtype", "{auto,int8,fp8_e4m3}", "KV in eight bits: twice the tokens, less exact"),
    ("--blocks", "N", "KV blocks per worker; 0: by free memory, embedded: 2048"),
)


def whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ArgumentTypeError(f"{text!r}: give a whole number from {low} to {high}")
        return value

    return read


def seconds(high: float) -> Callable[[str], float]:
    """Above 0, and at most `high`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= high:  # also false for not-a-number
            raise ArgumentTypeError(f"{text!r}: give seconds above 0, at most {high:g}")
        return value

    return read


def setting(name: str) -> Callable[[str], str]:
    """The text of a value that the setting may have."""

    def read(text: str) -> str:
        _check(name, text)
        return text

    return read


def assignment(text: str) -> str:
    """SECTION.KEY=VALUE, of a setting that there is."""
    name, equals, value = text.partition("=")
    if not equals or name.count(".") != 1:
        raise ArgumentTypeError(f"{text!r}: write it as section.key=value")
    _check(name.strip(), value.strip())
    return text


def new_file(text: str) -> Path:
    """Where a file may be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ArgumentTypeError(f"{why}: give a file in a folder that is there")
    return path


def default_of(name: str) -> str:
    """A setting and its default, as help tells them."""
    section, key = name.split(".")
    return f"{name}; default: {getattr(getattr(Config(), section), key)}"


def _check(name: str, text: str) -> None:
    from baton.runtime.settings.loading import check

    try:
        check(name, text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
