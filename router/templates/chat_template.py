"""Chat templates: from a list of messages to the prompt's text, by the model's own template.

Rendered by Jinja2, as in transformers, within the limits of `template_sandbox.py`. That is Python
code, so a long chat is rendered in a thread, while the event loop continues. Knows no tokens.
State: the compiled templates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from baton.router.templates.model_card import ModelCard
from baton.router.templates.template_meter import Meter
from baton.router.templates.template_sandbox import TemplateEnvironment, TemplateRefusal
from baton.runtime.errors import InvalidRequest, ModelError

MAX_TEMPLATE_CHARS = 1 << 18  # the longest public templates have some 20,000
MAX_ERROR_CHARS = 300
EFFORT = "reasoning_effort"  # a variable of some templates, and OpenAI's field


class ChatTemplate:
    """`source` is the model's template, `with_tools` the one for chats with tools, if that is
    another. Raises ModelError if one does not compile."""

    def __init__(self, source: str, special: dict[str, str], with_tools: str | None = None) -> None:
        sources = {"chat": source, "tools": source if with_tools is None else with_tools}
        self._inline, self._apart = _Compiled(sources), _Compiled(sources)
        self._thread_is_free = asyncio.Lock()
        self._special = special
        self._reads_effort = {
            name: EFFORT in text and self._inline.reads(EFFORT, text)
            for name, text in sources.items()
        }
        self._knows_developer = {name: "developer" in text for name, text in sources.items()}

    @property
    def literals(self) -> str:
        """Return all texts in the templates, separated by zeros."""
        return self._inline.literals

    def reads_effort(self, tools: bool) -> bool:
        """Return whether the template for chats with `tools`, or without, reads EFFORT."""
        return self._reads_effort[_name(tools)]

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
        return self._inline.render(*self._given(messages, tools, answer, variables))

    async def render_apart(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Same as `render` for a long chat: in a thread, one chat after the other."""
        given = self._given(messages, tools, True, variables)
        await self._thread_is_free.acquire()  # bounded by the caller's deadline
        running = asyncio.ensure_future(asyncio.to_thread(self._apart.render, *given))
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)  # a thread cannot be stopped; its bounds end it

    def _ended(self, running: asyncio.Task[str]) -> None:
        """Free the thread, even if the chat's request has ended before."""
        self._thread_is_free.release()
        if not running.cancelled():
            running.exception()

    def _given(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        answer: bool,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str, dict[str, Any]]:
        """Return the template's name and its variables."""
        name = _name(bool(tools))
        if not self._knows_developer[name]:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        return name, {
            "documents": None,
            **self._special,
            **(variables or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": answer,
        }


def _name(tools: bool) -> str:
    return "tools" if tools else "chat"


class _Compiled:
    """The templates by name. Renders one chat at a time."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._environment = TemplateEnvironment()
        compiled = {source: self._compile(source) for source in dict.fromkeys(sources.values())}
        self._templates = {name: compiled[source] for name, source in sources.items()}
        self.literals = "\0".join(
            text for source in compiled for text in self._environment.literals(source)
        )

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(
                f"the model's chat template has {len(source)} characters, at most "
                f"{MAX_TEMPLATE_CHARS} are allowed: shorten it, or download the model again"
            )
        try:
            return self._environment.from_string(source)
        except Exception as error:  # a hostile template may raise anything
            raise ModelError(
                f"the model's chat template does not compile ({error}): repair it, "
                "or download the model again"
            ) from error

    def reads(self, variable: str, source: str) -> bool:
        return variable in self._environment.variables(source)

    def render(self, name: str, given: dict[str, Any]) -> str:
        """Return the text. Raises InvalidRequest if the template fails."""
        self._environment.meter = Meter()
        try:
            return self._templates[name].render(given)
        except TemplateRefusal as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        except Exception as error:
            # A hostile template may raise anything.
            said = str(error)[:MAX_ERROR_CHARS]
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {said}", "messages"
            ) from error


def template_of(card: ModelCard) -> ChatTemplate | None:
    if card.template is None:
        return None
    return ChatTemplate(card.template, card.special, card.tool_template)
