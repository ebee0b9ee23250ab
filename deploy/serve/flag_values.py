"""The values that options of the command line accept, and the defaults that their help shows.

argparse puts the name of the option in front of these messages, and ends the process with exit
code 2. Keeps no state.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from baton.runtime.config import Config
from baton.runtime.errors import ConfigError

MAX_PORT = 65_535
NO_ADMIN = -1  # the port of a router without an admin port
MAX_WORKERS = 64  # of one role, on one host
FLAG_SETTINGS = {  # option -> setting, for the options that are settings
    "host": "router.host",
    "port": "router.port",
    "grpc_port": "router.grpc_port",
    "placement": "router.placement",
    "device": "worker.device",
    "dtype": "worker.dtype",
    "tp": "worker.tp",
    "ep": "worker.ep",
    "blocks": "pool.blocks",
    "quantization": "worker.quantization",
    "kv_dtype": "pool.kv_dtype",
    "deterministic": "worker.deterministic",
    "speculate": "worker.speculate",
    "registry": "registry.location",
}
SETTING_OPTIONS = (  # option, what stands for its value, what it is
    ("--host", "HOST", "the router's address"),
    ("--port", "PORT", "the router's port; 0: chosen by the system"),
    ("--grpc-port", "PORT", "port for gRPC clients; 0: chosen by the system; -1: off"),
    ("--placement", "{auto,disaggregated,local}", "where prompts are computed"),
    ("--device", "{auto,cpu,cuda,cuda:N}", "where workers compute"),
    ("--dtype", "{auto,float32,bfloat16,float16}", "dtype of the weights; auto: the model's"),
    ("--tp", "N", "tensor parallelism: processes that each worker's model is split over"),
    ("--ep", "N", "expert parallelism: groups of those processes, each with other experts"),
    ("--quantization", "{none,int8,int4}", "quantise the weights while loading"),
    (
        "--kv-dtype",
        "{auto,int8,fp8_e4m3}",
        "dtype of the KV cache; 8 bits hold twice the tokens, less exactly",
    ),
    (
        "--speculate",
        "{off,ngram,suffix,draft,draft=FOLDER,eagle3,eagle3=FOLDER}",
        "propose tokens that one step verifies",
    ),
    ("--blocks", "N", "KV blocks per worker; 0: by free memory (embedded model: 2048)"),
)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`."""

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
    """Return a parser of seconds above 0, at most `high`."""

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
    """Return a parser that accepts what the setting accepts, and returns the text."""

    def read(text: str) -> str:
        _check(name, text)
        return text

    return read


def proposer(text: str) -> str:
    """The text of `--speculate`: a value of the setting, or draft=FOLDER or eagle3=FOLDER."""
    name, equals, folder = text.partition("=")
    if name in ("draft", "eagle3") and equals:
        if not folder or not Path(folder).is_dir():
            raise ArgumentTypeError(f"{text!r}: there is no folder {folder!r}")
        return text
    return setting("worker.speculate")(text)


def proposer_settings(text: str) -> dict[str, str]:
    """The settings that `--speculate` stands for."""
    name, _, folder = text.partition("=")
    given = {"worker.speculate": name}
    if folder:
        given["worker.draft_model"] = str(Path(folder).resolve())
    return given


def assignment(text: str) -> str:
    """Parse SECTION.KEY=VALUE; the setting must exist, and be no password of the registry."""
    given, equals, value = text.partition("=")
    name = given.strip()
    if not equals or name.count(".") != 1:
        raise ArgumentTypeError(f"{text!r}: write it as section.key=value")
    _check(name, value.strip())
    if name == "registry.password":
        raise ArgumentTypeError(
            f"{name} is a secret, and other users of this host see command lines: set "
            "BATON_REGISTRY__PASSWORD"
        )
    if name == "registry.location":
        location(value.strip())
    return text


def location(text: str) -> str:
    """Parse the location of a registry, without a password."""
    from baton.runtime.shared_registry.registry_location import check_argument

    try:
        check_argument(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def new_file(text: str) -> Path:
    """Parse a path at which a file can be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ArgumentTypeError(f"{why}: give a file in an existing folder")
    return path


def default_of(name: str) -> str:
    """Return the text for help: the setting and its default."""
    section, key = name.split(".")
    return f"{name}; default: {getattr(getattr(Config(), section), key)}"


def _check(name: str, text: str) -> None:
    from baton.runtime.settings.loading import check

    try:
        check(name, text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
