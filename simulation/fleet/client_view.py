"""The client's view of its answer: the text that the router shows, and the usage beside it.

The router's own `RequestHandler` makes both, of a text that has one character for each token: so it
is seen which tokens the client has received. Knows no fleet and no checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.answers.choice_text import ChoiceDelta
from baton.router.answers.request_handler import RequestHandler
from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.text.control_tokens import ControlTokens
from baton.router.text.detokenizer import Detokenizer
from baton.router.text.tokenizer import Text

_FIRST = 0x10000  # no surrogates from here on


class CharacterTokenizer:
    """Implements `router.tokenizer.Tokenizer` as far as answers need it."""

    vocab_size = 0x100000
    longest_token_bytes = 4

    async def encode(self, text: Text, *, add_special_tokens: bool) -> list[int]:
        whole = text if isinstance(text, str) else "".join(piece.text for piece in text)
        return [ord(character) - _FIRST for character in whole]

    def control_tokens(self, printed: str) -> ControlTokens:
        return ControlTokens([])

    async def exceeds(self, text: str, most_tokens: int) -> bool:
        return len(text) > most_tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join([chr(_FIRST + token) for token in tokens])

    def token_bytes(self, token: int) -> bytes:
        return chr(_FIRST + token).encode()

    def token_id(self, text: str) -> int | None:
        return None

    def detokenizer(self, prompt: Sequence[int], shown: Sequence[str] = ()) -> Detokenizer:
        return _CHARACTERS

    async def close(self) -> None:
        pass


class _Characters:
    """Implements `Detokenizer`; keeps nothing."""

    def push(self, token: int) -> str:
        return chr(_FIRST + token)

    def flush(self) -> str:
        return ""


_CHARACTERS = _Characters()
TOKENIZER = CharacterTokenizer()


class ClientView(RequestHandler):
    """The router's answer; `outputs` are those that the last pieces were made of, and `text` is
    what the client has been shown so far, by choice."""

    outputs: Sequence[OutputToken] = ()

    def begun(self) -> ActiveRequest:
        assert self._active_request is not None
        return self._active_request

    def take(self, pieces: Sequence[ChoiceDelta], text: list[str]) -> None:
        for piece in pieces:
            text[piece.choice] += piece.text

    def _pieces(
        self, active_request: ActiveRequest, outputs: Sequence[OutputToken]
    ) -> list[ChoiceDelta]:
        self.outputs = outputs
        return super()._pieces(active_request, outputs)
