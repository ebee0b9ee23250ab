"""Jinja2 as transformers runs chat templates, with limits on time, memory and output.

A template comes with a model and is not trusted. Jinja2's sandbox gives it no access to Python;
this one keeps it from running for ever and from filling the memory: a meter counts its
operations, and a value that would be too large is refused before it is made. Knows no messages.
State: the meter of the current rendering; one environment renders one chat at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace

from baton.router.templates.template_meter import MAX_INT_BITS, LimitExceeded, Meter

MAX_WIDTH = 10_000  # of a width or count that a filter or a method gets
_MAX_FORMAT_WIDTH = 999


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRINTING = _words(  # filters that convert their arguments to text
    "capitalize center e escape forceescape format indent lower replace string striptags title "
    "tojson trim truncate upper urlencode wordcount"
)
_FILTERS = _PRINTING | _words(
    "abs attr batch count d default dictsort first float groupby int items join last length list "
    "map max min reject rejectattr reverse round safe select selectattr slice sort sum unique"
)
_ANY_NUMBER = _words("d default float int sum")  # filters whose numbers are no widths
_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal "
        "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust "
        "lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition "
        "rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
    ),
    dict: _words("copy get items keys values"),
    list: _words("copy count index"),
    tuple: _words("count index"),
}
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\d{4}|\*)")


class TemplateRefusal(Exception):
    """The template called `raise_exception` for these messages."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Set a new `meter` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.meter = Meter()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # it would compute constants without the meter
            extensions=[_Generation, LoopControlExtension],
            finalize=self._print,
        )
        self.code_generator_class = _MeteredGenerator
        guards: dict[str, Callable[..., Any]] = {
            "format": self._guard_format,
            "indent": self._guard_indent,
            "join": self._guard_join,
            "replace": self._guard_replace,
            "sum": self._guard_sum,
            "tojson": self._guard_json,
        }
        self.filters = {
            name: self._metered(name, function, guards.get(name))
            for name, function in {**FILTERS, "tojson": to_json}.items()
            if name in _FILTERS
        }
        tests = cast(Mapping[str, Callable[..., Any]], TESTS)  # it is typed too narrowly
        self.tests = {name: self._ticking(test) for name, test in tests.items()}
        self.globals = {
            "range": safe_range,
            "cycler": Cycler,
            "joiner": Joiner,
            "dict": dict,
            "namespace": _namespace,
            "raise_exception": _refuse,
            "strftime_now": self._now,
        }

    def literals(self, source: str) -> Iterator[str]:
        """Yield the texts of a template, outside and inside its expressions."""
        tree = self.parse(source)
        yield from (node.data for node in tree.find_all(nodes.TemplateData))
        constants = (node.value for node in tree.find_all(nodes.Const))
        yield from (value for value in constants if isinstance(value, str))

    def variables(self, source: str) -> set[str]:
        """Return the variables that a template reads and does not set before."""
        return find_undeclared_variables(self.parse(source))

    def join_texts(self, values: Sequence[Any]) -> Any:
        """Return what the operator `~` makes."""
        return self.meter.admit("".join([str(self.meter.printed(value)) for value in values]))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for times, value in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | list | tuple):
                    self.meter.reserve(times * self.meter.weigh(value))
        elif operator == "**" and abs(right) > MAX_INT_BITS:
            raise LimitExceeded(f"it makes an integer of over {MAX_INT_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right if isinstance(right, tuple) else (right,))
        made = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(made, list | tuple):
            return self.meter.admit_sum(left, right, made)
        return self.meter.admit(made)

    def call(
        __self,  # noqa: B902  # what is called may take an argument `self`
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._method_arguments(__obj.__name__, owner, args)
        __self.meter.tick()
        return __self.meter.admit(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.tick()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names or attr in getattr(obj, "_fields", ())
        if isinstance(obj, int | float):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            form: str = value.__self__
            self._check_fields(form, form.count("{"), (*args, *kwargs.values()))
            return _NarrowFormatter(self).vformat(form, args, kwargs)

        return formatted if value.__name__ == "format" else self._refuse_format_map

    def _refuse_format_map(self, *_: Any) -> str:
        raise LimitExceeded("it calls format_map")

    @jinja2.pass_context  # so that no constant is printed at compile time
    def _print(self, _: Context, value: Any) -> Any:
        return self.meter.printed(value)

    def _now(self, form: str) -> str:
        self._check_widths([len(form)])
        return datetime.now().strftime(form)

    def _method_arguments(self, name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in ("center", "ljust", "rjust", "zfill"):
            self._check_widths(args)
        elif name == "join" and args:
            args = (self._joinable(args[0], text), *args[1:])
        elif name == "replace":
            self._guard_replace(text, *args)
        return args

    def _metered(
        self, name: str, function: Callable[..., Any], guard: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the template's own arguments

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            own, (value, *rest) = args[:first], args[first:]
            if name not in _ANY_NUMBER:
                self._check_widths((*rest, *kwargs.values()))
            if name in _PRINTING:
                for each in (value, *rest, *kwargs.values()):
                    self.meter.printed(each)
            if guard is not None:
                value = guard(value, *rest, **kwargs)
            return self.meter.admit(function(*own, value, *rest, **kwargs))

        return metered

    def _ticking(self, test: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(test)
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            return test(*args, **kwargs)

        return ticking

    def _guard_format(self, form: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_percent(str(form), (*args, *kwargs.values()))
        return form

    def _guard_indent(self, text: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
        columns = len(width) if isinstance(width, str) else width
        self.meter.reserve((str(text).count("\n") + 1) * columns)
        return text

    def _guard_join(self, values: Any, d: Any = "", attribute: Any = None) -> Any:
        return self._joinable(values, str(self.meter.printed(d)))

    def _guard_replace(self, text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> Any:
        found = str(text).count(str(old))
        self.meter.reserve(found * len(str(new)))
        return text

    def _guard_sum(self, values: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise LimitExceeded("it adds up lists")
        return values

    def _guard_json(self, value: Any, *options: Any, **named: Any) -> Any:
        widths = [each for each in (*options, *named.values()) if isinstance(each, int)]
        self.meter.reserve(self.meter.weigh(value) * max([1, *widths]))
        return value

    def _joinable(self, values: Any, separator: str) -> Any:
        """Return the values, as a list unless they are a text, if their join is not too large."""
        if not isinstance(values, str):
            values = self.meter.admit(list(values))
        self.meter.reserve(self.meter.weigh(values) + len(values) * len(separator))
        return values

    def _check_percent(self, form: str, values: Sequence[Any]) -> None:
        if _WIDE_FORMAT.search(form):
            raise LimitExceeded(f"it formats a value with a width of over {_MAX_FORMAT_WIDTH}")
        self._check_fields(form, form.count("%"), values)

    def _check_fields(self, form: str, fields: int, values: Sequence[Any]) -> None:
        """Reserve the weight of a format whose every field shows a value or fills a width."""
        heaviest = max((self.meter.weigh(self.meter.printed(value)) for value in values), default=0)
        self.meter.reserve(len(form) + fields * (heaviest + _MAX_FORMAT_WIDTH))

    def _check_widths(self, values: Iterable[Any]) -> None:
        if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
            raise LimitExceeded(f"it asks for a width or count of over {MAX_WIDTH}")


class _MeteredGenerator(CodeGenerator):
    """Adds a call of the meter to each statement and each expression that makes a value."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        super().blockvisit([], frame)  # a body may be empty
        for node in nodes:
            self.writeline(f"environment.meter.tick({_printed_length(node)})")
            super().blockvisit([node], frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._wrap("admit", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._wrap("admit", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._wrap("admit", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._wrap("copied", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.meter.tick() and ")
        super().visit_Compare(node, frame)
        self.write(")")

    def _wrap(
        self, method: str, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame
    ) -> None:
        self.write(f"environment.meter.{method}(")
        visit(node, frame)
        self.write(")")


def _printed_length(node: nodes.Node) -> int:
    parts = node.nodes if isinstance(node, nodes.Output) else ()
    return sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))


class _Generation(Extension):
    """transformers' tag around an assistant's text: prints its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("print_body"), [], [], body).set_lineno(line)

    def print_body(self, caller: Macro) -> str:
        printed: str = caller()
        return printed


class _NarrowFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{4}", format_spec):
            raise LimitExceeded(f"it formats a value with a width of over {_MAX_FORMAT_WIDTH}")
        return super().format_field(value, format_spec)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    made = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def _refuse(message: str) -> str:
    raise TemplateRefusal(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )
