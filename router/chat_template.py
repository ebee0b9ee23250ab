"""Chat templates: from a list of messages to the prompt's text, by the model's own template.

Rendering is Jinja2's, as in transformers, in the bounds of `template_sandbox.py`. Knows no tokens.
State: the compiled templates; one rendering at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from baton.router.model_card import ModelCard
from baton.router.template_meter import Meter
from baton.router.template_sandbox import TemplateEnvironment, TemplateRefusal
from baton.runtime.errors import InvalidRequest, ModelError

MOST_SOURCE = 1 << 18  # characters of a template; the longest public ones have some 20,000
LONGEST_ERROR = 300  # characters


class ChatTemplate:
    """`source` is the model's template, `with_tools` the one for chats with tools, if that is
    another. Raises ModelError if one does not compile."""

    def __init__(self, source: str, special: dict[str, str], with_tools: str | None = None) -> None:
        sources = {"chat": source, "tools": source if with_tools is None else with_tools}
        self._environment = TemplateEnvironment()
        self._templates = {name: self._compile(text) for name, text in sources.items()}
        self._special = special
        self._knows_developer = {name: "developer" in text for name, text in sources.items()}

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > MOST_SOURCE:
            raise ModelError(
                f"the model's chat template has {len(source)} characters, at most {MOST_SOURCE} "
                "are read: shorten it, or download the model again"
            )
        try:
            return self._environment.from_string(source)
        except Exception as error:  # a hostile one fails in many ways; this is their seam
            raise ModelError(
                f"the model's chat template does not compile ({error}): repair it, "
                "or download the model again"
            ) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt, open for the assistant's answer unless `answer` is false. `variables`
        are the template's own, such as `enable_thinking`. Without tools the template sees none, as
        in transformers. Raises InvalidRequest naming `messages` if the template refuses them or
        cannot be rendered with them."""
        name = "tools" if tools else "chat"
        if not self._knows_developer[name]:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        given = {
            "documents": None,
            **self._special,
            **(variables or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": answer,
        }
        self._environment.meter = Meter()
        try:
            return self._templates[name].render(given)
        except TemplateRefusal as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        except Exception as error:  # as above
            said = str(error)[:LONGEST_ERROR]
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {said}", "messages"
            ) from error


def template_of(card: ModelCard) -> ChatTemplate | None:
    if card.template is None:
        return None
    return ChatTemplate(card.template, card.special, card.tool_template)
