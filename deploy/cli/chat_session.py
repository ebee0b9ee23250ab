"""`baton chat`: a conversation in the terminal, with line editing and history.

Reads lines through readline where stdin is a terminal; history lasts as long as the process and
is written nowhere. Rich only draws. Owns the conversation; the server keeps none.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.deploy.cli.chat import ChatClient, Message, ServedModel, ServerRefusal, printable
from baton.deploy.cli.process_list import router_urls
from baton.models.embedded import EMBEDDED
from baton.runtime.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_URL = "http://127.0.0.1:8000"
CONTEXT_FULL = "context_length_exceeded"  # the code of a refusal
COMMANDS = {
    "/help": "list the commands",
    "/new": "start a new conversation; this one is forgotten",
    "/quit": "end the chat, as `exit`, `quit` and Ctrl-D do",
}
KEYS = "Arrow keys edit the line and bring earlier ones back; Ctrl-C clears it, or stops an answer."
HINT = "/help lists the commands, /quit ends."
_ENDS = ("/quit", "/exit", "quit", "exit")
DEMONSTRATION = (
    "a small demonstration model, trained on generated text: it knows nothing of the real world."
)
SUGGESTIONS = ("Explain in two sentences why the sky is blue.", "Write a haiku about autumn.")
DEMONSTRATION_SUGGESTIONS = (  # its card shows the answers
    "How much is 96 - 30?",
    "My code word is silent-beaver-99. I will ask you later.",
)


def chat(url: str | None, model: str | None, api_key: str | None, system: str | None) -> None:
    """Read a line, print the answer as it comes, until the user ends it. Without `url` the
    instance that runs on this host is asked, or DEFAULT_URL if none does; without `model`, the
    first that is served. Raises ConfigError if several instances run."""
    from rich.console import Console

    url = url or running_url(api_key)
    client = ChatClient(url, api_key)
    chosen = ServedModel(model) if model else client.models()[0]
    session = ChatSession(client, chosen, Console(), system)
    session.introduce(url)
    session.run()


def running_url(api_key: str | None) -> str:
    """Return the URL of the only instance of this user that runs, or the default. Raises
    ConfigError if there are several, or if a key would go to a program of another user."""
    urls = router_urls()
    if api_key and not urls:
        raise ConfigError(
            f"no instance of this user runs here, and the API key is not sent to whatever listens "
            f"at {DEFAULT_URL}: give --url"
        )
    if len(urls) > 1:
        raise ConfigError(f"several instances run: choose one with --url {' or '.join(urls)}")
    return urls[0] if urls else DEFAULT_URL


@dataclass(slots=True)
class ChatSession:
    """One conversation with `model`. `turns` are the user's messages and the answers, in turn."""

    client: ChatClient
    model: ServedModel
    console: Console
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def introduce(self, url: str) -> None:
        """Say what the model is, and two things to try."""
        from rich.markup import escape

        demonstration = self.model.name == EMBEDDED
        what = f"{DEMONSTRATION} " if demonstration else ""
        if self.model.context is not None:
            what += f"A conversation may have {self.model.context:,} tokens."
        name = escape(printable(self.model.name))
        self.console.print(f"[bold]{name}[/] at {escape(url)}: {what}".rstrip(": "))
        self.console.print("Try:")
        for text in DEMONSTRATION_SUGGESTIONS if demonstration else SUGGESTIONS:
            self.console.print(f"  [cyan]{escape(text)}[/]")
        self.console.print(HINT)

    def run(self) -> None:
        """Read and answer until the user ends the chat. Raises KeyboardInterrupt for Ctrl-C
        where stdin is no terminal, so that there is no line to clear."""
        prompt = self._prompt()
        while True:
            try:
                text = input(prompt).strip()
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print()
                if not sys.stdin.isatty():
                    raise
                continue
            if text in _ENDS:
                return
            if text.startswith("/") and text[1:].isalpha():
                self._obey(text)
            elif text:
                self._answer(text)

    def _prompt(self) -> str:
        """The prompt; escapes are marked, so that readline counts what is seen alone."""
        try:
            import readline
        except ImportError:  # a Python that was built without it: lines are read plainly
            return "you "
        readline.parse_and_bind("tab: self-insert")  # else it completes names of files
        if not self.console.is_terminal or self.console.no_color:
            return "you "
        return "\001\x1b[1;36m\002you\001\x1b[0m\002 "

    def _obey(self, command: str) -> None:
        if command == "/new":
            self.turns.clear()
            print("A new conversation.")
        elif command == "/help":
            for name, what in COMMANDS.items():
                print(f"{name:<6} {what}")
            print(KEYS)
        else:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else HINT
            print(f"There is no {printable(command)}: {hint}")

    def _answer(self, text: str) -> None:
        """Print one answer and keep it; a failure, or Ctrl-C, takes the question back."""
        self.turns.append({"role": "user", "content": text})
        answer = ""
        try:
            answer = self._streamed()
        except BatonError as error:
            print(f"\nbaton: error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(stopped)")
        if not answer:
            self.turns.pop()
            return
        self.turns.append({"role": "assistant", "content": answer})
        if self.client.finish_reason == "length":
            print("(cut: the conversation is as long as it may be; /new starts a new one)")

    def _streamed(self) -> str:
        """The whole answer, printed as it comes. If the context is full, the older half of the
        turns before the question is dropped, and it is asked again."""
        while True:
            try:
                return self._printed()
            except ServerRefusal as error:
                if error.reason != CONTEXT_FULL or len(self.turns) == 1:
                    raise
                self._drop_oldest()

    def _printed(self) -> str:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        answer = ""
        for piece in self.client.stream(self.model.name, opening + self.turns):
            answer += piece
            print(printable(piece), end="", flush=True)
        print()
        return answer

    def _drop_oldest(self) -> None:
        pairs = len(self.turns) // 2  # the question at the end has no answer yet
        dropped = -(-pairs // 2)
        del self.turns[: 2 * dropped]
        noun = "question" if dropped == 1 else "questions"
        print(
            f"(The context is full: the oldest {dropped} {noun} and answers were dropped. "
            "/new starts a new conversation.)"
        )
