"""Chat templates: from a list of messages to the prompt's text, by the model's own template.

Rendering is by minijinja with fuel, so that no template can run for ever, and with what
transformers gives its templates: `raise_exception`, `strftime_now`, `tojson` without HTML
escapes, trimmed blocks, loop controls. Knows no tokens. State: the compiled template, shared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import minijinja

from baton.router.model_card import ModelCard
from baton.runtime.errors import InvalidRequest, ModelError

FUEL = 4_000_000  # instructions: a tenth of a second; a long chat needs some ten thousand

# transformers' own tag, which marks what an assistant wrote; it prints nothing
_GENERATION = re.compile(r"{%(-?)\s*(end)?generation\s*(-?)%}")


class TemplateRefusal(Exception):
    """The template called `raise_exception`: the messages do not suit it."""


class ChatTemplate:
    """`source` is the model's template. Raises ModelError if it does not compile."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        source = _GENERATION.sub(_plain_block, source)
        self._environment = minijinja.Environment(
            templates={"chat": source},
            globals={"raise_exception": _refuse, "strftime_now": _now},
            filters={"tojson": _to_json},
            auto_escape_callback=lambda _: None,
            fuel=FUEL,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._special = special
        self._knows_developer = "developer" in source
        try:
            self._environment.render_template("chat", messages=[], **special)
        except (TemplateRefusal, minijinja.TemplateError) as error:
            if isinstance(error, minijinja.TemplateError) and "syntax error" in str(error):
                raise ModelError(
                    f"the model's chat template does not compile ({error.message}): repair it, "
                    "or download the model again"
                ) from error

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt, open for the assistant's answer. Raises InvalidRequest naming `messages`
        if the template refuses them or cannot be rendered with them."""
        if not self._knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            return self._environment.render_template(
                "chat", messages=messages, add_generation_prompt=True, **self._special
            )
        except TemplateRefusal as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        except minijinja.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error.message}",
                "messages",
            ) from error


def template_of(card: ModelCard) -> ChatTemplate | None:
    return None if card.template is None else ChatTemplate(card.template, card.special)


def _plain_block(tag: re.Match[str]) -> str:
    before, end, after = tag.groups()
    return f"{{%{before} {'endif' if end else 'if true'} {after}%}}"


def _refuse(message: str) -> str:
    raise TemplateRefusal(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    separators = options.get("separators")
    return json.dumps(
        value,
        ensure_ascii=bool(options.get("ensure_ascii", False)),
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=bool(options.get("sort_keys", False)),
    )
