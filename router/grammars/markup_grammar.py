"""The grammar of calls whose arguments are written one by one in markup.

    p_0_0: "<parameter=city>\\n" TEXT_0_0_0 "\\n"      a string: plain text up to the closing mark
    p_0_1: "<parameter=n>\\n" %json {...} "\\n</..."   any other value: JSON

Parameters come in the order of the schema's properties, each once. A string contains no closing
mark; where other types are admitted beside it, it is no text that would be read as one of those.
Beside strings, null, booleans and numbers without bounds are part of the same terminal, since the
longest match decides which terminal a text is; bounded numbers are left out, which is narrower than
the schema. Lists and objects are JSON, and no string begins with their bracket. A mark within a
string of JSON ends no value (markup_call.py). What a schema asks for and this form cannot be held
to is refused by name. Stateless.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from baton.router.grammars.lark_text import (
    ANYTHING,
    GrammarRules,
    GrammarTool,
    TokenId,
    regex,
    spelled,
)
from baton.router.text.call_form import MAX_HEADER_CHARS
from baton.router.text.markup_call import MarkupForm
from baton.router.text.markup_value import ANY_TYPE, branches, enumerated, value_types
from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.grammar_text import CALL_OPTIONS, inline_schema, objects, quoted

_TEXTLESS = ("title", "description", "default", "examples", "deprecated", "$comment")
_STRING_KEYS = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", *_TEXTLESS)
_DEFINITIONS = ("$defs", "definitions")
_OBJECT_KEYS = ("type", "properties", "required", "additionalProperties", *_DEFINITIONS)
_NAMES = ("$schema", "$id")  # of the whole schema, which ask for nothing
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3])(:[0-5][0-9]){2}"
_ZONE = r"(\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
}
_PLAIN = {  # beside strings
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]{0,14})",
    "number": r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,9})?",
}
_CONTAINERS = frozenset({"array", "object"})
_UNBOUNDED = (_PLAIN["null"], _PLAIN["boolean"])
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DEFINED = re.compile(r"#/(\$defs|definitions)/([^/]+)(/.*)?", re.DOTALL)
_SIGN = re.compile(r"\\.|[\[\]()|]", re.DOTALL)  # of a pattern's structure, or an escape
_LOOKS = {  # texts that are read as another type
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?[0-9][0-9.eE+-]*",
    "number": r"-?[0-9][0-9.eE+-]*",
    "array": r"\[.*",
    "object": r"\{.*",
}


def markup_rules(form: MarkupForm, tools: Sequence[GrammarTool], token: TokenId) -> list[str]:
    """Return the rules of `call`, after its opening. Raises InvalidRequest for a schema that this
    form cannot be held to."""
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules = GrammarRules()
    padding = "\n" if form.padded else ""
    closing = f"{form.end}\n{form.closing}" if form.closing else form.end
    for index, tool in enumerate(tools):
        head = f"{padding}{form.name}{tool.name}{form.name_end}\n"
        made = _Parameters(form, tool, index, token, rules)
        rules.add(
            f"call_{index}: {spelled(head, form.markers, token)} {made.sequence} "
            f"{spelled(closing, form.markers, token)}",
            tool,
        )
    return [f"call: {names}", *rules.lines]


class _Parameters:
    """Adds the rules of one tool's parameters; `sequence` refers to them."""

    def __init__(
        self,
        form: MarkupForm,
        tool: GrammarTool,
        index: int,
        token: TokenId,
        rules: GrammarRules,
    ) -> None:
        self._form = form
        self._tool = tool
        self._token = token
        self._root = dict(tool.schema or {})
        self._rules = rules
        self.sequence = self._any(f"p_{index}") if tool.free else self._listed(index)

    def _rule(self, text: str) -> None:
        self._rules.add(text, self._tool)

    def _any(self, name: str) -> str:
        """Return any parameters: of a free tool, whose schema asks for nothing."""
        form = self._form
        key = spelled(form.key, form.markers, self._token)
        after = spelled(form.key_end + self._before_value(), form.markers, self._token)
        value = self._text(f"{name.upper()}_VALUE", ANYTHING)
        sign = regex(rf"[^<>\r\n]{{1,{MAX_HEADER_CHARS // 2}}}")
        self._rule(f"{name.upper()}_KEY: {sign}")
        self._rule(f"{name}: {key} {name.upper()}_KEY {after} {value} {quoted(chr(10))}")
        return f"{name}*"

    def _listed(self, index: int) -> str:
        """Return the parameters that the schema has."""
        self._refuse_beside(self._root, (*_OBJECT_KEYS, *_TEXTLESS, *_NAMES), "the schema")
        properties = self._root.get("properties") or {}
        required: dict[str, Any] = dict.fromkeys(self._root.get("required") or [], {})
        names = []
        for number, (key, schema) in enumerate({**properties, **required, **properties}.items()):
            name = f"p_{index}_{number}"
            self._add(name, str(key), schema)
            names.append(name if key in required else f"{name}?")
        return " ".join(names)

    def _before_value(self) -> str:
        form = self._form
        return "\n" if form.padded else f"\n{form.value}"

    def _add(self, name: str, key: str, schema: Any) -> None:
        form = self._form
        if not key or len(key) > MAX_HEADER_CHARS // 2 or any(sign in key for sign in "<>\r\n"):
            raise self._refused(f"its name {key[:50]!r} cannot be written")
        head = f"{form.key}{key}{form.key_end}{self._before_value()}"
        values = self._values(name, key, schema)
        text = spelled(head, form.markers, self._token)
        after = quoted("\n")
        self._rule(f"{name}: {text} ({' | '.join(values)}) {after}")

    def _values(self, name: str, key: str, schema: Any) -> list[str]:
        """Return the alternatives of a value, each with the mark at its end."""
        found = branches(schema, self._root) or [{}]
        types = frozenset[str]().union(*(value_types(each, self._root) for each in found))
        if types - ANY_TYPE:
            raise self._refused(
                f"the parameter {key!r}: there is no type {min(types - ANY_TYPE)[:50]!r}"
            )
        if "string" in types:
            texts = [each for branch in found for each in self._texts(key, branch, types)]
            text = self._text(name.upper(), " | ".join(texts))
            beside = enumerate(self._containers(found))
            return [text, *(self._other(f"{name}_{index}", each) for index, each in beside)]
        return [self._other(f"{name}_{index}", each) for index, each in enumerate(found)]

    def _containers(self, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the lists and objects among alternatives of which some are strings; none where a
        text may be anything, or a value of an enumeration begins like them."""
        made = []
        for each in found:
            types = value_types(each, self._root)
            if types == ANY_TYPE:
                return []
            if types & _CONTAINERS and enumerated(each):
                return []
            if types & _CONTAINERS:
                made.append({**each, "type": sorted(types & _CONTAINERS)})
        return made

    def _texts(self, key: str, schema: Mapping[str, Any], every: frozenset[str]) -> list[str]:
        """Return the texts of one alternative among several, of which some are strings. `every`
        has the types of all."""
        types = value_types(schema, self._root)
        if types == ANY_TYPE:
            self._refuse_beside(schema, _TEXTLESS, f"the parameter {key!r}, without a type,")
            return [ANYTHING]
        values = enumerated(schema)
        if values:
            written = (each if isinstance(each, str) else json.dumps(each) for each in values)
            return [quoted(each) for each in written]
        bounded = any(bound in schema for bound in _BOUNDS)
        plain = [_PLAIN[each] for each in sorted(types) if each in _PLAIN]
        texts = [regex(each) for each in plain if not bounded or each in _UNBOUNDED]
        if "string" in types:
            texts.append(self._string(key, schema, every - {"string"}))
        return texts

    def _string(self, key: str, schema: Mapping[str, Any], others: frozenset[str]) -> str:
        """Return a string's text with all that its schema asks for."""
        if schema.get("type") == "string":
            self._refuse_beside(schema, _STRING_KEYS, f"the parameter {key!r}")
        parts = [ANYTHING]
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if low or high != "":
            parts.append(regex(f".{{{low},{high}}}"))
        if "pattern" in schema:
            parts.append(regex(_searched(str(schema["pattern"]))))
        if "format" in schema:
            named = str(schema["format"])
            if named not in _FORMATS:
                raise self._refused(
                    f"the parameter {key!r}: format {named[:50]!r} is not "
                    "supported in this form of calls: leave it out"
                )
            parts.append(regex(_FORMATS[named]))
        if others and others != ANY_TYPE:
            looks = "|".join(sorted({_LOOKS[each] for each in others}))
            parts.append("~" + regex(rf"[ \t\r\n]*({looks})[ \t\r\n]*"))
        return "(" + " & ".join(parts) + ")"

    def _text(self, terminal: str, inner: str) -> str:
        """Return a text that ends with the mark, which it does not contain. If the mark is text
        too, it is part of the terminal: the longest match must not run over it."""
        form = self._form
        mark = quoted(form.value_end)
        if self._token(form.value_end) is None:
            end = quoted(("\n" if form.padded else "") + form.value_end)
            body = f"(({inner}) {end}) & ~({ANYTHING} {mark} {regex('.+')})"
            self._rule(f"{terminal}: {body}")
            return terminal
        self._rule(f"{terminal}: ({inner}) & ~({ANYTHING} {mark} {ANYTHING})")
        return f"{terminal} {self._end()}"

    def _other(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Return a value that is no string as JSON, which `rule` describes."""
        described = {**self._reached(schema), **schema}
        self._rule(f"{rule}: {inline_schema(described, CALL_OPTIONS)}")
        return f"{rule} {self._end()}"

    def _reached(self, schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the definitions of the root that the schema refers to, or one of them does."""
        kept: dict[str, dict[str, Any]] = {}
        layer: list[Any] = [dict(schema)]
        while layer:
            for each in objects(layer.pop()):
                reference = each.get("$ref")
                if not isinstance(reference, str):
                    continue
                found = _DEFINED.fullmatch(reference)
                if found is None:
                    raise self._refused(
                        f"the reference {reference[:50]!r} leads to no definition: put what it "
                        "names into $defs"
                    )
                section, name = found[1], unquote(found[2]).replace("~1", "/").replace("~0", "~")
                defined = self._root.get(section)
                known = kept.setdefault(section, {})
                if isinstance(defined, dict) and name in defined and name not in known:
                    known[name] = defined[name]
                    layer.append(defined[name])
        return kept

    def _end(self) -> str:
        padding = "\n" if self._form.padded else ""
        return spelled(padding + self._form.value_end, self._form.markers, self._token)

    def _refuse_beside(self, schema: Mapping[str, Any], known: Sequence[str], of: str) -> None:
        other = [key for key in schema if key not in known and not key.startswith("x-")]
        if other:
            raise self._refused(
                f"{of} has {other[0][:50]!r}, to which calls in this form cannot be held: "
                "leave it out"
            )

    def _refused(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"tools: {self._tool.name}: {reason}", "tools")


def _searched(pattern: str) -> str:
    """Return a pattern that matches a whole text in which the given one is found."""
    return "|".join(_whole(each) for each in _alternatives(pattern))


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the parts of a pattern of which one matches."""
    groups = classes = start = literal = 0
    for found in _SIGN.finditer(pattern):
        sign = found.group()
        if sign == "[":
            classes += 1
            literal = found.end() + pattern.startswith("^", found.end())  # where "]" ends no class
        elif classes:
            classes -= sign == "]" and found.start() != literal
        elif sign in "()":
            groups += 1 if sign == "(" else -1
        elif sign == "|" and groups == 0:
            yield pattern[start : found.start()]
            start = found.end()
    yield pattern[start:]


def _whole(part: str) -> str:
    begin = part[1:] if part.startswith("^") else f".*{part}"
    body = begin.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return f"{begin}.*" if body == begin or escaped else body
