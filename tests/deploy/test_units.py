"""Units, the compose files and the images' files: commands, settings and paths exist, processes get
the time that they take to stop, and they are confined."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from baton.deploy.cli.arguments import config_of
from baton.deploy.cli.main import parser
from baton.deploy.serve.plan import ServeOptions, devices, gpus_of_actors
from baton.models.embedded import embedded_model
from baton.router.http_frontend.auth_middleware import OPEN_PATHS
from baton.runtime.config import Config
from tests.support.json_values import JsonObject

ROOT = Path(__file__).resolve().parent.parent.parent
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
IMAGES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
SYSTEMD = shutil.which("systemd-analyze")


def without_comments(path: Path) -> str:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


def command_of(unit: Path) -> list[str]:
    """Return what systemd starts, for the worker prefill-0 of the host node-1."""
    (line,) = re.findall(r"^ExecStart=(.*)$", without_comments(unit), re.MULTILINE)
    for specifier, value in (("%i", "prefill-0"), ("%H", "node-1"), ("%d", "/run/credentials")):
        line = re.sub(rf"(?<!%){specifier}", value, line)
    words = shlex.split(line.replace("%%", "%").replace("${BATON_MODEL}", "/models/m"))
    if words[:2] != ["/bin/sh", "-c"]:
        return words
    script = words[2].replace("$$", "$")
    shown = script.replace("exec /opt/baton/bin/baton", "printf '%s\\n' /opt/baton/bin/baton")
    environment = {"BATON_MODEL": "/models/m"}
    out = subprocess.run(["/bin/sh", "-c", shown, *words[3:]], env=environment,
                         capture_output=True, text=True, check=True)  # fmt: skip
    return out.stdout.splitlines()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_that_exists(unit: Path) -> None:
    program, *arguments = command_of(unit)
    assert program == "/opt/baton/bin/baton"
    options = parser().parse_args(_without_config(arguments))
    if options.command == "worker":
        assert (options.role, options.worker_id) == ("prefill", "node-1-prefill-0")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_settings_and_files_of_a_unit_exist(unit: Path) -> None:
    """Each file in a setting is a credential that the unit loads."""
    _, *arguments = command_of(unit)
    config = config_of(parser().parse_args(_without_config(arguments)))
    text = without_comments(unit)
    loaded = {f"/run/credentials/{x}" for x in re.findall(r"^LoadCredential=(.*?):", text, re.M)}
    security = config.security
    named = {security.authority, security.certificate, security.key} - {""}
    assert named == loaded
    assert arguments[arguments.index("--config") + 1] == "/etc/baton/baton.toml"
    assert "EnvironmentFile=/etc/baton/baton.env" in text.splitlines()


def stop_s(command: str) -> float:
    """Return the longest time that a command takes to stop with the default settings."""
    config = Config()
    router_s, worker_s = config.router.leave_s + config.router.drain_s, config.worker.drain_s
    both_s = router_s + worker_s  # `baton serve` stops the router, then the workers
    return {"router": router_s, "worker": worker_s, "serve": both_s}[command]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_until_its_process_has_stopped(unit: Path) -> None:
    (given,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
    assert int(given) >= stop_s(command_of(unit)[1]) + 10


def _without_config(arguments: list[str]) -> list[str]:
    index = arguments.index("--config")
    return arguments[:index] + arguments[index + 2 :]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_confines_its_process(unit: Path) -> None:
    text = without_comments(unit)
    for line in ("DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict",
                 "CapabilityBoundingSet=", "KillSignal=SIGTERM"):  # fmt: skip
        assert line in text.splitlines()
    assert not re.search(r"(?i)(token|password|key)=\S", text.replace(".key=%d", ""))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_signals_the_main_process_alone(unit: Path) -> None:
    """To `baton serve`, which stops its processes in order; a second signal would cut requests off.
    What is left of a service at its end is killed."""
    assert "KillMode=mixed" in without_comments(unit).splitlines()


@pytest.mark.parametrize("name", ["baton-worker@", "baton"])
def test_units_of_workers_have_a_folder_for_kernels(name: str) -> None:
    """A dynamic user's home is /, which ProtectSystem=strict keeps read-only. The folder of a
    template's unit is of one instance, since another's user may not write there."""
    (unit,) = [unit for unit in UNITS if unit.stem == name]
    text = without_comments(unit)
    (folder,) = re.findall(r"^CacheDirectory=(\S+)$", text, re.MULTILINE)
    (given,) = re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
    assert f"HOME=%C/{folder}" in given.split()
    assert ("%i" in folder) == name.endswith("@")


@pytest.mark.parametrize("name", ["baton-worker@", "baton-router"])
def test_a_process_that_ends_by_itself_is_started_again(name: str) -> None:
    """`baton drain` ends a worker with exit code 0."""
    (unit,) = [unit for unit in UNITS if unit.stem == name]
    assert "Restart=always" in without_comments(unit).splitlines()


@pytest.mark.skipif(SYSTEMD is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    assert SYSTEMD is not None
    name = unit.name.replace("@", "@prefill-0")
    copy = tmp_path / name
    copy.write_text(unit.read_text().replace("/opt/baton/bin/baton", "/bin/true"))
    done = subprocess.run(
        [SYSTEMD, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stderr.splitlines() if name in line] == []


def compose_service(file: str, **given: str) -> JsonObject:
    """Return the file's service, with `given` and else the defaults for its variables. Raises
    KeyError with the file's message for one that has no default."""

    def value(variable: re.Match[str]) -> str:
        name, need, text = variable.groups()
        if need == "?" and name not in given:
            raise KeyError(f"{name}: {text}")
        return given.get(name, text)

    text = (ROOT / "deploy" / file).read_text()
    text = re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)
    assert "${" not in text
    (service,) = yaml.safe_load(text)["services"].values()
    return dict(service)


def test_the_compose_file_starts_a_command_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose_service("compose.yaml", BATON_API_KEY="a-key")
    program, *arguments = service["command"]
    options = parser().parse_args(arguments)
    assert (program, options.command) == ("baton", "serve")
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    config = config_of(options)
    assert (config.router.host, config.router.api_keys) == ("0.0.0.0", ("a-key",))
    assert service["ports"] == [f"127.0.0.1:{config.router.port}:{config.router.port}"]
    assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
    assert int(service["stop_grace_period"].removesuffix("s")) >= stop_s("serve") + 10


def test_paths_of_the_compose_file_exist() -> None:
    service = compose_service("compose.yaml", BATON_API_KEY="a-key")
    image = (ROOT / "deploy" / "docker" / "worker.Dockerfile").read_text()
    (model,) = [word for word in service["command"] if word.startswith("/")]
    assert f"ln -s /opt/venv/baton-tiny {model}" in image
    (built,) = re.findall(r"docker build .*-t (\S+) \.$", image, re.MULTILINE)[:1]
    assert service["image"] == built
    url = urlsplit(re.findall(r'urlopen\("([^"]+)"', service["healthcheck"]["test"][-1])[0])
    assert url.port == Config().router.port and url.path in OPEN_PATHS
    assert service["environment"]["HOME"] == service["tmpfs"]  # all else is read-only


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (3, 1), (2, 6)])
def test_workers_of_the_gpu_override_share_no_gpu(
    monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int
) -> None:
    counts = {"BATON_PREFILL": str(prefill), "BATON_DECODE": str(decode)}
    base = compose_service("compose.yaml", BATON_API_KEY="a-key", **counts)
    override = compose_service("compose-gpu.yaml", BATON_GPUS=str(prefill + decode))
    for name, value in (base["environment"] | override["environment"]).items():
        monkeypatch.setenv(name, value)
    serve = parser().parse_args(base["command"][1:])
    options = ServeOptions(config=config_of(serve), prefill=serve.prefill, decode=serve.decode)
    assert options.config.worker.device == "cuda"  # the CPU is not a substitute
    (reserved,) = override["deploy"]["resources"]["reservations"]["devices"]
    assert (reserved["driver"], reserved["capabilities"]) == ("nvidia", ["gpu"])
    shares = gpus_of_actors(options, reserved["count"])
    assert list(shares.values()) == [1.0] * (prefill + decode)
    alone = devices(replace(options, launcher="process"), reserved["count"])
    assert len(set(alone.values())) == prefill + decode


def test_the_gpu_override_needs_the_number_of_gpus() -> None:
    with pytest.raises(KeyError, match="BATON_GPUS: .* number of workers"):
        compose_service("compose-gpu.yaml")


def test_the_gpu_override_adds_what_a_gpu_needs() -> None:
    """What it leaves alone keeps the confinement of compose.yaml."""
    override = compose_service("compose-gpu.yaml", BATON_GPUS="2")
    assert set(override) == {"image", "environment", "tmpfs", "ulimits", "deploy"}
    image = (ROOT / "deploy" / "docker" / "worker.Dockerfile").read_text()
    (built,) = re.findall(r"REQUIREMENTS=cuda -t (\S+) \.$", image, re.MULTILINE)
    assert override["image"] == built
    folder, _, options = override["tmpfs"].partition(":")
    assert override["environment"]["TRITON_CACHE_DIR"] == folder
    assert {"exec", "mode=1777"} == set(options.split(","))
    assert override["ulimits"] == {"memlock": -1}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_is_built_from_files_that_exist(image: Path) -> None:
    text = without_comments(image)
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    for name in ("cpu", "cuda"):
        assert (ROOT / "requirements" / f"{name}.lock").exists()
    assert "USER 10001:10001" in text and "/opt/baton/baton-tiny" in text
    assert (embedded_model() / "config.json").exists()
