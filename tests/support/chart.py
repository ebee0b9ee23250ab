"""The chart, rendered without a cluster: by `helm` where it is on PATH, else by Helm's library."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.support.chart_programs import templated
from tests.support.json_values import Json
from tests.support.published_crds import PUBLISHED

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "helm" / "baton"
CRDS = Path(os.environ.get("BATON_CRDS", ROOT.parent / "shared" / "crds"))
CRD_GROUPS = ("monitoring.coreos.com", "keda.sh", "ray.io")
CUSTOM = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ScaledObject", "RayCluster"}
FOREIGN = {*PUBLISHED, *CUSTOM}  # not of Kubernetes itself
Document = dict[str, Any]
Values = dict[str, Any]
# The fewest values of a release, by what starts its workers: tests of one form begin with them.
PLAIN: Values = {"orchestrator": "plain", "model": {"embedded": True}}
KUBERAY: Values = {**PLAIN, "orchestrator": "kuberay"}


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(str(FOLDER))


@cache
def parsed(text: str) -> tuple[Document, ...]:
    """Return the documents of a manifest, once for equal texts."""
    return tuple(each for each in yaml.load_all(text, yaml.CSafeLoader) if each)


def example(name: str) -> Values:
    """Return the values of values-NAME.yaml."""
    return dict(yaml.safe_load((FOLDER / f"values-{name}.yaml").read_text()))


def merged(*parts: Values) -> Values:
    """Return the values of all parts; a later one wins, mappings are merged."""
    whole: Values = {}
    for part in parts:
        for key, value in part.items():
            old = whole.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                value = merged(old, value)
            whole[key] = value
    return whole


def nested(path: str, value: Json) -> Values:
    """Return {"a": {"b": value}} for the path a.b."""
    *outer, last = path.split(".")
    made: Values = {last: value}
    for key in reversed(outer):
        made = {key: made}
    return made


@dataclass(frozen=True, slots=True)
class Release:
    """A rendered release."""

    documents: list[Document]
    notes: str

    def of_kind(self, *kinds: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] in kinds]

    def named(self, kind: str, ending: str) -> Document:
        (found,) = [
            document
            for document in self.of_kind(kind)
            if document["metadata"]["name"].endswith(f"-{ending}")
        ]
        return found

    def pods(self) -> list[tuple[Document, Document]]:
        """Return labels and specification of each pod that the release makes."""
        found = []
        for document in self.documents:
            if document["kind"] == "Pod":
                found.append((document["metadata"]["labels"], document["spec"]))
            elif document["kind"] == "RayCluster":
                spec = document["spec"]
                for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                    template = group["template"]
                    found.append((template["metadata"]["labels"], template["spec"]))
            elif "template" in document.get("spec", {}):
                template = document["spec"]["template"]
                found.append((template["metadata"]["labels"], template["spec"]))
        return found


def render(values: Values, name: str = "chat", namespace: str = "llm") -> Release:
    """Render the chart. Raises helm_python.HelmError with Helm's words."""
    helm = shutil.which("helm")
    printed = {} if helm is None else templated(helm, FOLDER, values, name, namespace)
    manifests = chart().render(values, name=name, namespace=namespace)
    if helm is not None:  # `helm template` prints no notes
        notes = {path: text for path, text in manifests.items() if path.endswith("NOTES.txt")}
        manifests = printed | notes
    return release_of(manifests)


def render_newer(values: Values, folder: Path) -> Release:
    """Render the chart as version 9.9.9, from a copy in `folder`."""
    copy = Path(shutil.copytree(FOLDER, folder / "newer"))
    text = (copy / "Chart.yaml").read_text()
    text = re.sub(r"(?m)^(version|appVersion): .*$", r"\1: 9.9.9", text)
    (copy / "Chart.yaml").write_text(text)
    newer = helm_python.Chart.load(str(copy))
    return release_of(newer.render(values, name="chat", namespace="llm"))


def release_of(manifests: Mapping[str, str]) -> Release:
    """Return what Helm has rendered, by the paths of the templates."""
    documents = [
        document
        for path, text in sorted(manifests.items())
        if not path.endswith("NOTES.txt")
        for document in parsed(text)
    ]
    (notes,) = [text for path, text in manifests.items() if path.endswith("NOTES.txt")]
    return Release(documents, notes)


def validate(document: Document, version: str) -> None:
    """Raise jsonschema.ValidationError for an object that this version of Kubernetes refuses, and
    for an unknown field."""
    group, _, last = document["apiVersion"].rpartition("/")
    api = "-".join(filter(None, [group.split(".")[0], last]))
    schema = _schema(version, f"{document['kind'].lower()}-{api}")
    jsonschema.Draft202012Validator(schema, registry=_definitions(version)).validate(document)


@cache
def _schema(version: str, name: str) -> Json:
    return schema_contents(f"{_folder(version)}/{name}.json", version)


@cache
def _definitions(version: str) -> Registry[Any]:
    definitions = schema_contents(f"{_folder(version)}/_definitions.json", version)
    return Resource.from_contents(definitions) @ Registry()


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict"


@cache
def custom_schemas() -> dict[str, Any]:
    """Return the schema of each kind that a custom resource definition in CRDS describes; it
    refuses unknown fields."""
    schemas = {}
    for path in itertools.chain.from_iterable(CRDS.glob(f"{each}_*.yaml") for each in CRD_GROUPS):
        definition = yaml.load(path.read_text(), yaml.CSafeLoader)
        served = [each for each in definition["spec"]["versions"] if each["served"]]
        closed = _closed(served[0]["schema"]["openAPIV3Schema"])
        schemas[definition["spec"]["names"]["kind"]] = closed
    return schemas


def _closed(schema: Json, root: bool = True) -> Json:
    """Refuse fields that a structural schema does not list, as the API server's strict mode."""
    if isinstance(schema, list):
        return [_closed(each, root=False) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: _closed(value, root=False)
        for key, value in schema.items()
        if key != "pattern" or isinstance(value, dict) or "(?i)" not in value  # not Python's syntax
    }
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or root
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        if not keeps and "additionalProperties" not in schema:
            made["additionalProperties"] = False
        if root:
            made["properties"]["metadata"] = {"type": "object"}
    return made
