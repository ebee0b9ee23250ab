"""A model's tokens as grammars read them: the bytes of each, and which end an output.

Router and workers build it from the same tokenizer file; `digest` names it, and a grammar is only
compiled for the vocabulary that it names. Building one for 150,000 tokens takes seconds, in which
the interpreter's lock is held: a worker does it before it serves, a router in another process.
Immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from baton.runtime.errors import ModelError

DIGEST_BYTES = 16
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` counts token ids, those without a text included."""

    digest: bytes
    size: int
    tokenizer: LLTokenizer


def vocabulary_digest(path: Path, size: int, ends: Iterable[int]) -> bytes:
    """Name the vocabulary of a tokenizer.json in a model of `size` tokens. Raises ModelError if the
    file cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again") from error
    return _digest(content, size, ends)


def read_vocabulary(path: Path, size: int, ends: Sequence[int]) -> Vocabulary:
    """Read the vocabulary of a tokenizer.json. Raises ModelError if that cannot be done."""
    digest = vocabulary_digest(path, size, ends)
    try:
        tokenizer = LLTokenizer(str(path), n_vocab=size, eos_token=sorted(ends) or None)
    except ValueError as error:
        raise ModelError(f"{path} is no vocabulary for grammars: {error}") from error
    return Vocabulary(digest, tokenizer.vocab_size, tokenizer)


def build_vocabulary(
    tokens: Sequence[bytes], ends: Sequence[int], special: Sequence[int] = ()
) -> Vocabulary:
    """Build a vocabulary from the bytes of each token; `ends` are special too."""
    source = _TokenSource(tokens, ends, special)
    tokenizer = LLTokenizer(TokenizerWrapper(source), eos_token=sorted(ends))
    digest = _digest(b"\0".join(tokens), len(tokens), ends)
    return Vocabulary(digest, len(tokens), tokenizer)


class _TokenSource:
    """A vocabulary in the form that llguidance reads."""

    def __init__(
        self, tokens: Sequence[bytes], ends: Sequence[int], special: Sequence[int]
    ) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = min(ends)
        self.bos_token_id = None
        self.special_token_ids = sorted({*ends, *special})
        plain = set(range(len(self.tokens))) - {*ends, *special}
        self._by_bytes = {self.tokens[token]: token for token in sorted(plain, reverse=True)}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Encode by the longest token each time: where a grammar admits one text alone, the mask
        admits its usual tokens alone."""
        found, start = [], 0
        while start < len(text):
            for length in range(self._longest, 0, -1):
                token = self._by_bytes.get(text[start : start + length])
                if token is not None:
                    found.append(token)
                    start += length
                    break
            else:
                break
        return found


def _digest(content: bytes, size: int, ends: Iterable[int]) -> bytes:
    state = blake2b(digest_size=DIGEST_BYTES)
    state.update(f"{size} {sorted(ends)} ".encode())
    state.update(content)
    return state.digest()
