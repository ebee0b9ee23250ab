"""Settings: which source beats which, what is refused and how it is said, and the default file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.settings import reference
from baton.runtime.settings.checks import declared_settings
from baton.runtime.settings.loading import DEFAULT_FILE, load, names


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


def default_text() -> str:
    return DEFAULT_FILE.read_text(encoding="utf-8")


def test_there_are_at_most_sixty_settings() -> None:
    """What no operator would change is a constant beside its use."""
    assert 30 < len(names()) <= 60


def test_nothing_given_gives_the_defaults() -> None:
    assert load(None, {}, {}) == Config()


def test_flags_beat_the_environment_and_that_beats_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "[router]\nport = 1\nhost = 'a'\nmax_requests = 3\n")
    environ = {"BATON_ROUTER__PORT": "2", "BATON_ROUTER__HOST": "b", "PATH": "/bin"}
    config = load(file, environ, {"router.port": "3"})
    assert (config.router.port, config.router.host, config.router.max_requests) == (3, "b", 3)
    assert config.pool == Config().pool


def test_variables_that_are_not_settings_are_left_alone() -> None:
    # Kubernetes makes BATON_ROUTER_PORT=tcp://... for a service called baton-router
    environ = {"BATON_TOKEN": "secret", "OTHER__ROUTER__PORT": "x", "BATON_ROUTER_PORT": "tcp://"}
    assert load(None, environ, {}) == Config()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("router.port", " 8_001 ", 8001),
        ("router.link_silence_s", "2", 2.0),
        ("router.api_keys", "one, two,", ("one", "two")),
        ("router.api_keys", "", ()),
        ("router.placement", "local", "local"),
        ("router.read_cached", "No", False),
        ("worker.deterministic", "1", True),
        ("telemetry.otlp_endpoint", "h:4317", "h:4317"),
    ],
)
def test_text_is_read_by_the_settings_own_type(name: str, text: str, value: object) -> None:
    section, key = name.split(".")
    variable = f"BATON_{section}__{key}".upper()
    for config in (load(None, {variable: text}, {}), load(None, {}, {name: text})):
        read = getattr(getattr(config, section), key)
        assert read == value
        assert type(read) is type(value)


def test_a_file_may_give_an_int_for_a_float_and_lists_for_tuples(tmp_path: Path) -> None:
    file = written(tmp_path, "[handoff]\nlease_s = 3\n[router]\napi_keys = ['k']\n")
    config = load(file, {}, {})
    assert config.handoff.lease_s == 3.0
    assert isinstance(config.handoff.lease_s, float)
    assert config.router.api_keys == ("k",)


@pytest.mark.parametrize(
    ("environ", "flags", "reported"),
    [
        ({"BATON_ROUTER__PROT": "1"}, {}, "BATON_ROUTER__PROT.*did you mean router.port"),
        ({"BATON_ROUTR__PORT": "1"}, {}, "BATON_ROUTR__PORT.*did you mean router"),
        ({}, {"pool.block_sizes": "1"}, "--set pool.block_sizes.*pool.block_size"),
        ({}, {"port": "1"}, "--set port: there is no setting port; the sections"),
        ({}, {"router.xyzzy": "1"}, "router.xyzzy; router has router.host, "),
        ({}, {"handoff.mover": "memory"}, "there is no setting handoff.mover"),
        ({"BATON_ROUTER__PORT": "http"}, {}, "BATON_ROUTER__PORT: .*'http': give a whole number"),
        ({"BATON_ROUTER__PORT": "1.5"}, {}, "give a whole number"),
        ({"BATON_HANDOFF__LEASE_S": "long"}, {}, "give a number"),
        ({"BATON_WORKER__DETERMINISTIC": "maybe"}, {}, "give true or false"),
        ({}, {"router.placement": "both"}, "give one of auto, disaggregated, local"),
        ({}, {"router.port": "65536"}, "router.port is 65536: give a value from 0 to 65535"),
        ({}, {"handoff.lease_s": "nan"}, "handoff.lease_s is nan"),
        ({}, {"step.chunk_tokens": "100"}, "multiple of pool.block_size"),
        ({}, {"security.tls": "no"}, "security.tls is 'no': give one of on, off"),
        ({}, {"security.key": "k"}, "security.authority and security.certificate must be given"),
        ({}, {"security.key": "k", "security.authority": "a"}, "^security.certificate must be"),
    ],
)
def test_what_is_wrong_is_refused_by_name_and_place(
    environ: dict[str, str], flags: dict[str, str], reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        load(None, environ, flags)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[router]\nport = '80'\n", "router.port is '80': give a whole number"),
        ("[router]\nport = true\n", "give a whole number"),
        ("[router]\nport = 1.0\n", "give a whole number"),
        ("[router]\napi_keys = 'one'\n", "router.api_keys is of another type: give a list"),
        ("[registry]\npassword = 12345\n", "registry.password is of another type: give text"),
        ("[router]\napi_keys = [1]\n", "give a list of strings"),
        ("[router]\nplacement = ['auto']\n", "give one of auto"),
        ("[worker]\ndeterministic = 1\n", "give true or false"),
        ("[handoff]\nlease_s = false\n", "give a number"),
        ("[telemetry]\notlp_endpoint = 1\n", "give text"),
        ("[ruoter]\n", "did you mean router"),
        ("port = 1\n", "put `port` under a section"),
        ("[router\n", "not valid TOML"),
        (f"[router]\nport = {'9' * 5000}\n", "not valid TOML"),
        ("[router]\napi_keys = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_and_named(tmp_path: Path, text: str, reported: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=reported) as refused:
        load(file, {}, {})
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\\n", "\\u0000", "schl\u00fcssel", " a"])
def test_a_key_that_all_or_none_would_have_is_refused_unshown(tmp_path: Path, key: str) -> None:
    """With an empty one `Authorization: Bearer` alone opened the router, on any host."""
    file = written(tmp_path, f'[router]\napi_keys = ["good", "{key}"]\n')
    with pytest.raises(ConfigError, match="router.api_keys: key 2 of 2 is empty or") as refused:
        load(file, {}, {})
    assert "good" not in str(refused.value) and "schl" not in str(refused.value)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*absent.toml: No such file"):
        load(tmp_path / "absent.toml", {}, {})
    file = tmp_path / "latin.toml"
    file.write_bytes(b"[router]\nhost = '\xe9'\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(file, {}, {})


def test_the_default_file_loads_as_the_defaults() -> None:
    assert load(DEFAULT_FILE, {}, {}) == Config()


def test_the_default_file_holds_every_setting_with_its_default() -> None:
    given = tomllib.loads(default_text())
    found = {
        f"{section}.{key}": value for section, keys in given.items() for key, value in keys.items()
    }
    assert list(found) == names()
    for name, setting in declared_settings().items():
        default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
        assert (found[name], type(found[name])) == (default, type(default)), name


def test_constant_of_a_section_is_no_setting() -> None:
    assert Config().router.retry_floor == 10
    with pytest.raises(ConfigError, match=r"there is no setting router\.retry_floor"):
        load(None, {}, {"router.retry_floor": "1"})


def test_generated_settings_files_are_current(tmp_path: Path) -> None:
    made = reference.generate(tmp_path)
    kept = [reference.CHECKOUT / path.relative_to(tmp_path) for path in made]
    stale = [str(k) for k, m in zip(kept, made, strict=True) if k.read_bytes() != m.read_bytes()]
    assert len(made) == 3 and stale == [], "run `make settings`"
