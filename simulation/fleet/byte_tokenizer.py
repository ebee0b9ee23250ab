"""A tokenizer whose tokens are bytes, so that a test can write down the tokens of any text.

255 is put before a text where special tokens are wanted. Keeps no state; streams no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.text.control_tokens import ControlTokens
from baton.router.text.detokenizer import Detokenizer
from baton.router.text.tokenizer import Text


class ByteTokenizer:
    """Implements `router.tokenizer.Tokenizer`, but for streams."""

    vocab_size = 256
    longest_token_bytes = 1

    async def encode(self, text: Text, *, add_special_tokens: bool) -> list[int]:
        whole = text if isinstance(text, str) else "".join(piece.text for piece in text)
        return [*([255] if add_special_tokens else []), *whole.encode()]

    def control_tokens(self, printed: str) -> ControlTokens:
        return ControlTokens([])  # each byte is text

    async def exceeds(self, text: str, most_tokens: int) -> bool:
        return len(text) > most_tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def token_id(self, text: str) -> int | None:
        return None

    def detokenizer(self, prompt: Sequence[int], shown: Sequence[str] = ()) -> Detokenizer:
        """Raises NotImplementedError: what is validated is not yet streamed."""
        raise NotImplementedError

    async def close(self) -> None:
        pass
