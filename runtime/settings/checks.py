"""The checks of a whole configuration: bounds of each setting, and settings that contradict others.

The bounds are those of the declarations in runtime/config.py. Pure; holds no state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.config import Config, RouterConfig, check_device, section_names
from baton.runtime.errors import ConfigError
from baton.runtime.setting import Setting, settings_of

# their values stand in no message
SECRET_SETTINGS = ("registry.password", "router.api_keys")

_VISIBLE = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+(?<!:)")


def declared_settings() -> dict[str, Setting]:
    """Return every setting by its name, "section.key", in the order of the default file."""
    return {
        f"{section}.{setting.name}": setting
        for section in section_names()
        for setting in settings_of(getattr(Config(), section))
    }


def validate(config: Config) -> None:
    """Raise ConfigError naming the first setting that is out of bounds or contradicts another."""
    check_device(config.worker.device)
    _check_files(config.security)
    _check_keys(config.router.api_keys)
    _check_origins(config.router)
    for name in declared_settings():
        check_setting(config, name)
    if config.router.grpc_port > 0 and config.router.grpc_port == config.router.port:
        raise ConfigError("router.grpc_port and router.port are the same: give another")
    if config.router.link_silence_s <= config.router.link_heartbeat_s:
        raise ConfigError(
            f"router.link_silence_s is {config.router.link_silence_s:g}: give a value above the "
            f"heartbeat interval ({config.router.link_heartbeat_s:g} s)"
        )
    check_groups(config.worker.tp, config.worker.ep)
    if config.step.chunk_tokens % config.pool.block_size:
        raise ConfigError(
            f"step.chunk_tokens is {config.step.chunk_tokens}: "
            f"give a multiple of pool.block_size ({config.pool.block_size})"
        )


def check_groups(tp: int, ep: int) -> None:
    """Raise ConfigError unless `tp` ranks can form `ep` equal groups."""
    if tp % ep:
        raise ConfigError(
            f"worker.ep is {ep} and worker.tp {tp}: the {tp} ranks of a worker cannot form {ep} "
            "equal groups; set worker.ep to a divisor of worker.tp, or 1"
        )


def check_setting(config: Config, name: str) -> None:
    """Raise ConfigError if this setting is out of its own bounds, whatever the others are."""
    section, key = name.split(".")
    value = getattr(getattr(config, section), key)
    if name == "worker.device":
        check_device(value)
    declared = declared_settings()[name]
    if declared.low is None or declared.high is None:
        return
    if not declared.low <= value <= declared.high:
        raise ConfigError(
            f"{name} is {value}: give a value from {declared.low:g} to {declared.high:g}"
        )


def _check_files(security: SecurityConfig) -> None:
    files = {name: getattr(security, name) for name in ("authority", "certificate", "key")}
    missing = [f"security.{name}" for name, file in files.items() if not file]
    if 0 < len(missing) < len(files):
        raise ConfigError(
            f"{' and '.join(missing)} must be given too: security.authority, "
            "security.certificate and security.key belong together"
        )


def _check_keys(keys: Sequence[str]) -> None:
    """Refuse an empty key, which every client has, and one that no header can carry. The message
    shows no key."""
    for number, key in enumerate(keys, start=1):
        if not _VISIBLE.fullmatch(key):
            raise ConfigError(
                f"router.api_keys: key {number} of {len(keys)} is empty or holds other than "
                "visible ASCII characters: give another, or leave it out"
            )


def _check_origins(router: RouterConfig) -> None:
    for origin in router.cors_origins:
        if origin == "*" and not router.api_keys:
            raise ConfigError(
                'router.cors_origins is "*" and router.api_keys is empty, so that every web page '
                "could use this server: name the origins, or set router.api_keys"
            )
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"router.cors_origins: {origin!r} is no origin: give scheme://host or "
                "scheme://host:port, without a path"
            )
