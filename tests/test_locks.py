"""The packages of the images, requirements/*.lock, agree with cpu.txt and carry hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from baton.deploy.docker.locks import HUB_CLIENT, SBOM_TOOL, normal_name, pinned_versions

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {path.stem: path for path in sorted((ROOT / "requirements").glob("*.lock"))}
IMAGES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
LINE = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")
PINNED = pinned_versions()


def packages(name: str) -> dict[str, str]:
    """Return the versions in a lock. Raises AssertionError for a line without a hash."""
    found: dict[str, str] = {}
    for line in LOCKS[name].read_text().splitlines():
        if not line.startswith("#"):
            matched = LINE.fullmatch(line)
            assert matched is not None, f"{name}: {line}"
            assert matched[1] not in found, line
            found[matched[1]] = matched[2]
    return found


def test_there_is_a_lock_for_each_image_and_its_tools() -> None:
    assert set(LOCKS) == {"build", "cpu", "cuda", "router", "sbom"}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_installs_by_hash_alone(image: Path) -> None:
    text = image.read_text().replace("\\\n", " ")
    installs = re.findall(r"pip (?:--python \S+ )?install (.*?)(?:&&|$)", text, re.MULTILINE)
    assert len(installs) == 4
    for options in installs:
        assert "--no-deps" in options
        assert "--no-index" in options or "--require-hashes" in options
    named = set(re.findall(r"requirements/(\S+)\.lock", text))
    assert {"build", "sbom"} < named <= {*LOCKS, "${REQUIREMENTS}"}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_workers_get_the_pinned_versions(name: str) -> None:
    found = packages(name)
    assert {key: found[key].removesuffix("+cpu") for key in PINNED} == PINNED
    besides = set(found) - set(PINNED)
    assert all(re.match("nvidia-|cuda-", each) for each in besides)
    assert found["torch"].endswith("+cpu") == (name == "cpu")


def test_cuda_workers_get_the_libraries_that_torch_loads() -> None:
    libraries = {re.sub("-cu13$", "", each) for each in packages("cuda")}
    loaded = ("cublas", "cuda-runtime", "cuda-nvrtc", "cudnn", "cufft", "curand", "cusolver",
              "cusparse", "cusparselt", "nccl", "nvjitlink", "nvshmem")  # fmt: skip
    assert {f"nvidia-{name}" for name in loaded} <= libraries


def test_routers_get_the_pinned_versions_and_no_torch() -> None:
    found = packages("router")
    assert found.items() <= PINNED.items()
    assert not {"torch", "ray", "nixl", "numba", "triton", *HUB_CLIENT} & set(found)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["redis"]]
    assert {normal_name(re.split(r"[<>=;\[]", each)[0]) for each in required} <= set(found)


def test_tools_that_build_an_image_are_pinned() -> None:
    assert packages("build") == {"setuptools": PINNED["setuptools"]}
    assert SBOM_TOOL in {f"{name}=={version}" for name, version in packages("sbom").items()}
