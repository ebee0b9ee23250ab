"""Templates that would run for ever, fill the memory or reach Python, and all that they get."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from baton.router.templates import template_meter
from baton.router.templates.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from baton.runtime.errors import InvalidRequest, ModelError
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness

CHAT: list[JsonObject] = [{"role": "user", "content": "a\n" * 1000}]
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = "
NEST = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(64) %}{% set ns.x = "
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "loops_of_nothing": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a_loops_condition": "{% for i in range(99999) if range(99999) | list | length == i %}"
    "{% endfor %}",
    "a_filter_in_a_filter": "{{ range(99999) | map('string') | map('list') | list | string "
    "| list | map('center', 9999) | list }}",
    "doubled_by_plus": DOUBLE + "ns.x + ns.x %}{% endfor %}",
    "doubled_by_tilde": DOUBLE + "ns.x ~ ns.x %}{% endfor %}",
    "doubled_by_replace": DOUBLE + "ns.x.replace('b', ns.x) %}{% endfor %}",
    "doubled_by_filter": DOUBLE + "ns.x | replace('b', ns.x) %}{% endfor %}",
    "doubled_by_join": DOUBLE + "[ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    "doubled_by_method": DOUBLE + "ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "doubled_by_format": DOUBLE + "'%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubled_by_braces": DOUBLE + "'{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubled_by_block": "{% set x = 'ab' %}{% macro m(x, n) %}{% set y %}{{ x }}{{ x }}{% endset %}"
    "{{ m(y, n - 1) if n else y }}{% endmacro %}{{ m('ab', 64) }}",
    "nested_lists": NEST + "[ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested_tuples": NEST + "(ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "nested_objects": NEST + "{'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "nested_sums": NEST + "ns.x + ns.x %}{% endfor %}",
    "nested_namespaces": NEST + "namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "itself": "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}",
    "itself_in_a_list": "{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns.me }}",
    "times": "{{ 'a' * 99999999999 }}",
    "times_list": "{{ [0] * 99999999999 }}",
    "power": "{{ 9 ** 999999999 }}",
    "product": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "percent_width": "{{ '%999999999d' % 1 }}",
    "percent_star": "{{ '%*d' % (999999999, 1) }}",
    "percent_precision": "{{ '%.999999999f' | format(1.5) }}",
    "brace_width": "{{ '{:999999999}'.format(1) }}",
    "brace_nested_width": "{{ '{:{}}'.format(1, 999999999) }}",
    "format_map": "{{ '{a}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "indent": "{{ (messages[0].content * 999) | indent(9999) }}",
    "json_indent": "{{ ([1] * 99999) | tojson(indent=9999) }}",
    "batch": "{{ [1] | batch(999999999, 0) | list }}",
    "slice": "{{ [1] | slice(999999999) | list }}",
    "sum_of_lists": "{{ [[1]] | sum(start=[]) }}",
    "date": "{{ strftime_now('%c' * 99999) }}",
    "much_output": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "much_output_in_macro": "{% macro m() %}{% for i in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "much_constant_output": "{% for i in range(99999) %}{{ '" + "x" * 9999 + "' }}{% endfor %}",
    "macro_for_ever": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "straight_comparisons": "{% set a = messages[0].content * 999 %}{% set b = a ~ 'x' %}"
    + "{% if a ~ 'y' == b %}{% endif %}" * 1000,
    "slices_kept": "{% set a = messages[0].content * 4000 %}"
    + "".join(f"{{% set v{i} = a[1:] %}}" for i in range(300)),
    "mutation": "{{ messages.append(1) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 9999}) }}",
    "bytes": "{{ (5).to_bytes(999999999, 'big') }}",
    "include": "{% include 'chat' %}",
    "filter_as_a_value": "{{ [raise_exception] }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_ends_within_bounds(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], {})
    started_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="cannot render|refuses"):
        template.render(CHAT)
    assert time.thread_time() - started_s < template_meter.TIME_LIMIT_S + 2 * slowness()


@pytest.mark.parametrize(
    "name", ["doubled_by_tilde", "much_output_in_macro", "nested_lists", "slices_kept", "indent"]
)
def test_hostile_template_takes_little_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_meter, "TIME_LIMIT_S", 5.0)  # tracing makes all of it slow
    template = ChatTemplate(HOSTILE[name], {})
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            template.render(CHAT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * template_meter.MAX_TOTAL_CHARS


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages[0].content | attr('__class__') | attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__.meter }}",
        "{{ messages.append.__self__ }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    ],
)
def test_template_reaches_nothing_of_python(source: str) -> None:
    try:
        assert ChatTemplate(source, {}).render(CHAT) == ""
    except InvalidRequest as error:
        assert "unsafe" in str(error) or "undefined" in str(error) or "no attribute" in str(error)


def test_empty_bodies_are_rendered() -> None:
    source = (
        "{% if messages %}{% endif %}{% for m in messages %}{% endfor %}{% set x %}{% endset %}x"
    )
    assert ChatTemplate(source, {}).render(CHAT) == "x"


def test_template_too_long_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="at most"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1), {})


@pytest.mark.parametrize("source", ["{% for %}", "{% if 1 %}" * 200, "{{ " + "(" * 9999, "{% x %}"])
def test_template_that_does_not_compile_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source, {})


def test_constants_cost_nothing_at_compile_time() -> None:
    started_s = time.thread_time()
    ChatTemplate("{{ 'a' * 99999999999 }}{{ 9 ** 9 ** 9 }}{{ 'a' | center(999999999) }}", {})
    assert time.thread_time() - started_s < slowness()


def test_large_contents_are_rendered() -> None:
    text = "é" * (8 << 20)
    template = ChatTemplate("{{ '<user>' + messages[0].content | trim + '<end>' }}", {})
    assert template.render([{"role": "user", "content": text}]) == f"<user>{text}<end>"


def test_each_rendering_has_its_own_bounds() -> None:
    template = ChatTemplate("{% for i in range(3000) %}{{ 'x' * 9999 }}{% endfor %}", {})
    for _ in range(10):  # together beyond what one may make
        template.render(CHAT)
