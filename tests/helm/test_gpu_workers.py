"""The chart's workers with GPUs: none of them serves on the CPU because nothing showed it a GPU."""

from __future__ import annotations

import re

import pytest
import yaml

from baton.deploy.cli.arguments import config_of
from baton.deploy.cli.main import parser
from tests.support.chart import FOLDER, ROOT, Document, Release, Values, example, merged, render
from tests.support.chart_choices import EXAMPLES

GPUS = example("single-node-8gpu")
CHANGING: Values = {
    "prefill": {"replicas": 3},
    "decode": {"replicas": 3},
    "autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}},
}


def worker_of(release: Release, component: str) -> Document:
    pool = release.named("StatefulSet", component)
    (container,) = pool["spec"]["template"]["spec"]["containers"]
    return dict(container)


def device_of(container: Document) -> str:
    arguments = [each for each in container["args"] if each.startswith("--set=worker.device")]
    line = ["worker", "--role=decode", "--worker-id=a", "--model=m", *arguments]
    return config_of(parser().parse_args(line)).worker.device


@pytest.mark.parametrize(
    ("change", "component", "device"),
    [
        ({}, "prefill", "cuda"),
        ({}, "decode", "cuda"),
        (CHANGING, "worker", "cuda"),
        ({"decode": {"gpu": {"count": 0}}}, "decode", "auto"),
        ({"workers": {"settings": {"worker.device": "auto"}}}, "decode", "auto"),
        ({"decode": {"settings": {"worker.device": "cuda:0"}}}, "decode", "cuda:0"),
    ],
)
def test_a_worker_with_a_gpu_never_takes_the_cpu(
    change: Values, component: str, device: str
) -> None:
    """By `auto` it would, with an image without CUDA or on a node whose driver is broken."""
    assert device_of(worker_of(render(merged(GPUS, change)), component)) == device


@pytest.mark.parametrize("name", ["", *EXAMPLES])
def test_images_are_those_that_the_dockerfiles_build(name: str) -> None:
    """The heads of the Dockerfiles name them; with CUDA where workers have GPUs."""
    heads = [path.read_text() for path in (ROOT / "deploy" / "docker").glob("*.Dockerfile")]
    built = re.findall(r"^#   docker build (.*)-t (\S+) \.$", "\n".join(heads), re.MULTILINE)
    with_cuda = {image: "REQUIREMENTS=cuda" in how for how, image in built}
    values = merged(
        yaml.safe_load((FOLDER / "values.yaml").read_text()), example(name) if name else {}
    )
    assert with_cuda[values["image"]["router"]] is False
    for role in ("prefill", "decode"):
        assert with_cuda[values["image"]["worker"]] == (values[role]["gpu"]["count"] > 0)
