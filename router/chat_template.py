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

FUEL = 1_000_000  # instructions: 35 ms, for which the loop waits; 4096 messages need 0.2 million

# transformers' own tag, which marks what an assistant wrote; it prints nothing
_GENERATION = re.compile(r"{%(-?)\s*(end)?generation\s*(-?)%}")


class TemplateRefusal(Exception):
    """The template called `raise_exception`: the messages do not suit it."""


class ChatTemplate:
    """`source` is the model's template, `with_tools` the one for chats with tools, if that is
    another. Raises ModelError if one does not compile."""

    def __init__(self, source: str, special: dict[str, str], with_tools: str | None = None) -> None:
        sources = {"chat": source, "tools": source if with_tools is None else with_tools}
        self._environment = minijinja.Environment(
            templates={name: _GENERATION.sub(_plain_block, text) for name, text in sources.items()},
            globals={"raise_exception": _refuse, "strftime_now": _now},
            filters={"tojson": _to_json},
            auto_escape_callback=lambda _: None,
            fuel=FUEL,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._special = special
        self._knows_developer = {name: "developer" in text for name, text in sources.items()}
        for name in sources:
            self._compile(name)

    def _compile(self, name: str) -> None:
        try:
            self._environment.render_template(name, messages=[], **self._special)
        except (TemplateRefusal, minijinja.TemplateError) as error:
            if isinstance(error, minijinja.TemplateError) and "syntax error" in str(error):
                raise ModelError(
                    f"the model's chat template does not compile ({error.message}): repair it, "
                    "or download the model again"
                ) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        answer: bool = True,
    ) -> str:
        """The prompt, open for the assistant's answer unless that is not wanted. Raises
        InvalidRequest naming `messages` if the template refuses them or cannot be rendered with
        them. Without tools the template sees none, as in transformers."""
        name = "tools" if tools else "chat"
        if not self._knows_developer[name]:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            return self._environment.render_template(
                name,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=answer,
                **self._special,
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
    if card.template is None:
        return None
    return ChatTemplate(card.template, card.special, card.tool_template)


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
