"""Bounds of the chart's values: each wrong one is refused by a sentence with its remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import helm_python
import pytest
import yaml

from baton.runtime.errors import ConfigError
from baton.runtime.settings import loading
from baton.runtime.settings.checks import declared_settings
from tests.support.chart import FOLDER, ROOT, Document, Values, example, merged, nested, render
from tests.support.chart_table import properties
from tests.support.json_values import Json

DEMO = example("cpu-demo")
BOUNDS = yaml.safe_load((FOLDER / "bounds.yaml").read_text())
SCHEMA = json.loads((FOLDER / "values.schema.json").read_text())
OF_SCHEMAS = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "enum", "const", "minItems", "maxItems", "propertyNames",
}  # fmt: skip


def refusal(values: Values) -> str:
    """Return the sentence by which the chart refuses these values."""
    with pytest.raises(helm_python.HelmError) as refused:
        render(merged(DEMO, values))
    found = re.search(r"execution error at \(baton/templates/\S+: (.*)", str(refused.value), re.S)
    assert found is not None, str(refused.value)
    return found[1]


def subschemas(schema: Json) -> Iterator[Document]:
    if isinstance(schema, dict):
        yield schema
        for inner in schema.values():
            yield from subschemas(inner)


def test_bounds_are_not_in_the_schema_whose_words_are_bare() -> None:
    """Helm reads the schema first: "at '/prefill/replicas': minimum: got 0, want 1"."""
    keywords = {
        key for each in subschemas(SCHEMA) for key in each if not isinstance(each[key], dict)
    }
    assert not keywords & OF_SCHEMAS


def test_each_number_has_bounds_and_each_bound_a_value() -> None:
    known = dict(properties(SCHEMA))
    numbers = {path for path, inner in known.items() if inner.get("type") in ("integer", "number")}
    assert set(BOUNDS["numbers"]) == numbers
    bounded = [*BOUNDS["choices"], *BOUNDS["texts"], *BOUNDS["numbers"]]
    assert set(bounded) <= set(known) and len(bounded) == len(set(bounded))
    assert {f"{section}.resources" for section in BOUNDS["resources"]} == {
        path for path in known if path.endswith("resources")
    }


def test_a_number_out_of_bounds_is_named_with_its_range() -> None:
    for path, (first, last, *_) in BOUNDS["numbers"].items():
        for wrong in (first - 1, last + 1):
            found = refusal(nested(path, wrong))
            assert found.startswith(f"{path} is {wrong}"), found
            assert f"; give a number from {first} to {last}" in found
        assert re.match(f"{path} is not set(, but .*)?; give a number", refusal(nested(path, None)))


@pytest.mark.parametrize("path", ["router.replicas", "prefill.replicas", "decode.replicas"])
def test_zero_of_a_component_is_refused_with_the_reason(path: str) -> None:
    found = refusal(nested(path, 0))
    assert re.fullmatch(rf"{path} is 0, but .* needs? .*; give a number from 1 to \d+\s*", found)


def test_a_zero_of_a_further_model_names_the_model() -> None:
    further = {"models": {"code": {"model": {"embedded": True}, "decode": {"replicas": 0}}}}
    assert refusal(further).startswith("models.code: decode.replicas is 0, but a model needs")


def test_a_wrong_choice_is_named_with_all_choices() -> None:
    for path, allowed in BOUNDS["choices"].items():
        found = refusal(nested(path, "other"))
        assert found.startswith(f"{path} is other; give one of {', '.join(allowed)}"), found
    assert "off, in quotes" in refusal({"tls": {"mode": False}})  # YAML's `off`


def test_a_text_of_a_wrong_form_is_named_with_its_form() -> None:
    for path, form in BOUNDS["texts"].items():
        found = refusal(nested(path, " ?"))
        assert found.startswith(path) and BOUNDS["forms"][form]["words"] in found, found
    for section in BOUNDS["resources"]:
        wrong = {"requests": {"memory": "lots"}}
        found = refusal(nested(f"{section}.resources", wrong))
        assert found.startswith(f"{section}.resources.requests.memory is lots; give a size in Mi")
    assert "a name in models is A_b; give at most 16" in refusal(
        {"models": {"A_b": {"model": {"embedded": True}}}}
    )
    assert "workers.topologyLabels is ?; give labels of" in refusal(
        {"workers": {"topologyLabels": ["?"]}}
    )


def test_a_collector_may_have_an_ipv6_address() -> None:
    render(merged(DEMO, nested("monitoring.otlpEndpoint", "https://[fd00::5]:4317")))
    assert refusal(nested("monitoring.otlpEndpoint", "https://fd00::5:4317")).startswith("monitor")


def test_a_port_of_the_api_out_of_bounds_is_named() -> None:
    found = refusal({"networkPolicy": {"apiPorts": [443, 0]}})
    assert found.startswith("networkPolicy.apiPorts has 0; give numbers from 1 to 65535")
    for none in ([], None):  # Kubernetes takes no ports for all
        found = refusal({"networkPolicy": {"apiPorts": none}})
        assert found.startswith("networkPolicy.apiPorts is empty, which would open every port")


def test_a_password_in_the_url_of_redis_is_not_shown() -> None:
    found = refusal({"redis": {"enabled": False, "url": "redis://:hunter2@r"}})
    assert found.startswith("redis.url has another form; give rediss://") and "hunter2" not in found


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        ({"kvHeads": 0}, 1, None),
        (
            {"kvHeads": 0},
            2,
            "decode.tp is 2, but model.kvHeads is 0, so that .*; set model.kvHeads",
        ),
        ({"kvHeads": 8}, 2, None),
        ({"kvHeads": 8}, 3, "decode.tp is 3, which does not divide model.kvHeads 8; set decode.tp"),
        ({"kvHeads": 8}, 16, "decode.tp is 16, above model.kvHeads 8, but model.heads is 0; set m"),
        ({"kvHeads": 8, "heads": 32}, 16, None),
        ({"kvHeads": 8, "heads": 40}, 16, "decode.tp is 16, which does not divide model.heads 40"),
        ({"kvHeads": 8, "heads": 12}, 1, "model.heads is 12, no multiple of model.kvHeads 8; take"),
    ],
)
def test_ranks_that_cannot_split_the_heads_are_named(
    model: Values, tp: int, words: str | None
) -> None:
    known = {"model": {"embedded": False, "repository": "o/n", **model}, "decode": {"tp": tp}}
    if words is None:
        render(merged(DEMO, known))
    else:
        assert re.match(words, refusal(known))


def test_heads_of_the_embedded_model_are_known() -> None:
    config = json.loads((ROOT / "models" / "baton-tiny" / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert f"does not divide model.kvHeads {kv_heads};" in refusal({"decode": {"tp": 3}})
    assert f"does not divide model.heads {heads};" in refusal({"decode": {"tp": 2 * heads}})
    render(merged(DEMO, {"prefill": {"tp": heads}, "decode": {"tp": kv_heads}}))


def test_examples_name_the_heads_of_their_models() -> None:
    """So that another tp in them is checked; Qwen3-8B has 32 heads and 8 KV heads."""
    for name in ("production", "single-node-8gpu"):
        model = example(name)["model"]
        assert "Qwen3-8B" in (model.get("repository") or model["path"])
        assert (model["heads"], model["kvHeads"]) == (32, 8)


@pytest.mark.parametrize(
    ("name", "renamed", "words"),
    [
        ("nvidia.com/gpu", False, None),
        ("nvidia.com/gpu.shared", False, None),
        ("nvidia.com/mig-3g.40gb", False, None),
        ("nvidia.com/mig-1g.10gb.me", False, None),
        ("nvidia.com/mig-1g.10gb.me.all", False, None),
        ("nvidia.com/mig-1g.10gb.shared", False, None),
        ("nvidia.com/h2000", False, "NVIDIA's device plugin does not offer by itself; name nvid"),
        ("nvidia.com/mig-1g", False, "set decode.gpu.renamed=true if your plugin's configuration"),
        ("example.com/gpu", False, "decode.gpu.renamed=true"),
        ("nvidia.com/a100", True, None),
        ("amd.com/gpu", True, "a device for which Baton has no kernels"),
        ("h200", True, "which no device plugin offers"),
    ],
)
def test_gpus_that_are_unknown_are_refused(name: str, renamed: bool, words: str | None) -> None:
    values = {"decode": {"gpu": {"resource": name, "renamed": renamed}}}
    if words is None:
        render(merged(DEMO, values))
        return
    found = refusal(values)
    assert found.startswith(f"decode.gpu.resource is {name}, ") and words in found


@pytest.mark.parametrize("section", ["router", "workers", "prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("worker.nonsense", 1, "which is no setting of Baton; remove it, or take the name from"),
        ("nonsense", 1, "which is no setting of Baton"),
        ("pool.blocks", "many", ": many; give a whole number, 0 to"),
        ("pool.blocks", 1.5, ": 1.5; give a whole number"),
        ("pool.blocks", -1, ": -1; give a whole number"),
        ("telemetry.trace_ratio", 2, ": 2; give a number, 0 to 1"),
        ("router.read_cached", "perhaps", ": perhaps; give true or false"),
        (
            "worker.speculate",
            False,
            ": false; give one of off, ngram, suffix, draft, eagle3, in quotes",
        ),  # YAML's `off`
    ],
)
def test_a_wrong_setting_is_named(section: str, name: str, value: object, words: str) -> None:
    found = refusal({section: {"settings": {name: value}}})
    assert found.startswith(f"{section}.settings has {name}") and words in found


def test_each_setting_may_have_its_default() -> None:
    """But for those that the chart gives itself."""
    given = {}
    for name, setting in declared_settings().items():
        owned = name.startswith(("registry.", "security.")) or name in OWNED
        if not owned:
            lists = isinstance(setting.default, tuple)
            given[name] = ",".join(setting.default) if lists else setting.default
    assert len(given) > 30
    render(merged(DEMO, {"router": {"settings": given}}))


OWNED = {
    "router.api_keys", "router.drain_s", "router.grpc_port", "router.host", "router.leave_s",
    "router.port", "router.tls", "worker.admin_port", "worker.advertise", "worker.drain_s",
    "worker.ep", "worker.host", "worker.port", "worker.tp",
}  # fmt: skip


def test_settings_are_read_as_processes_read_them() -> None:
    known = json.loads((FOLDER / "settings.json").read_text())
    assert list(known) == loading.names()
    texts = ("1", "-1", "+2", "1_000", "1__0", "_1", "1.", ".5", "1.5e3", "1e", "x", "", "true",
             "YES", "On", "offf", "auto", "local", "Local", "0x10", "99999999999")  # fmt: skip
    for name, row in known.items():
        for text in texts:
            fits = text in row["allowed"] if "allowed" in row else True
            if "pattern" in row:
                fits = re.search(row["pattern"], text) is not None
            if fits and "low" in row:
                fits = row["low"] <= float(text.replace("_", "")) <= row["high"]
            try:
                loading.check(name, text)
            except ConfigError:
                assert not fits or name == "worker.device", (name, text)
            else:
                assert fits, (name, text)
