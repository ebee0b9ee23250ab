"""The `Tokenizer` seam: text to token ids, and back piece by piece.

`HfTokenizer` is the real implementation, on Hugging Face `tokenizers`; encoding runs in its own
two threads with a bounded queue (encode_queue.py), so that a long prompt holds up no other
request. A prompt whose request has ended leaves the queue at once, and counts for as long as a
thread is at it. A text that is most likely too long is counted slice by slice before.

Special tokens written in a completion's prompt are read as special tokens, as OpenAI-compatible
servers do: completion clients depend on it. What a chat's messages hold of them is text
(control_tokens.py). The thread pool is owned here; `close` ends it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import tokenizers

from baton.router.text.control_tokens import ControlToken, ControlTokens, Piece
from baton.router.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    MarkingDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)
from baton.router.text.encode_queue import EncodeJob, EncodeQueue
from baton.router.text.plain_tokenizer import PlainTokenizer
from baton.runtime.errors import InvalidRequest, ModelError, Overloaded

ENCODE_THREADS = 2
LIKELY_CHARS = 6  # of a token; a text of more than a context of these is counted first
SLICE_CHARS = 1 << 16  # counted at once: some 50 ms of a thread
CUT_TOKENS = 64  # by which a slice may count more than its part of the whole text


Text = str | Sequence[Piece]


class Tokenizer(Protocol):
    """`vocab_size` counts added tokens too. All methods but `encode` are quick."""

    vocab_size: int
    longest_token_bytes: int

    async def encode(self, text: Text, *, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest for text that is not Unicode, or that no tokens but control tokens
        stand for, Overloaded if too many wait."""
        ...

    def control_tokens(self, printed: str) -> ControlTokens:
        """Return the special tokens, and those other added ones that stand in `printed`. From then
        on `encode` takes pieces in which they are text."""
        ...

    async def exceeds(self, text: str, most_tokens: int) -> bool:
        """Return whether the text has more tokens for sure; False without a look where it is short
        enough to be encoded at once. Raises what `encode` does."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for inside a text; maybe a part of a character."""
        ...

    def detokenizer(self, prompt: Sequence[int], shown: Sequence[str] = ()) -> Detokenizer:
        """A new incremental detokenizer for an output that follows `prompt`. Special tokens are
        left out, but for those of the texts `shown`."""
        ...

    async def close(self) -> None: ...


class HfTokenizer:
    """A tokenizer.json; one prompt more than `queue` is refused. Raises ModelError if the file
    cannot be read."""

    def __init__(self, path: Path, queue: int = 256) -> None:
        # else a batch, also one of one text, starts a thread for each of the machine's cores
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception; this is its seam
            raise ModelError(f"{path} cannot be read ({error}): download it again") from error
        # limits on length belong to the router, which says so; a tokenizer must not cut in silence
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(
            token
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special
        )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._byte_level = byte_level_bytes(self._tokenizer, vocabulary)
        self.longest_token_bytes = max(
            (len(piece.encode(errors="replace")) for piece in vocabulary), default=1
        )
        self._plain: PlainTokenizer | None = None
        self._queue = EncodeQueue(queue, ENCODE_THREADS)
        self._running: set[asyncio.Future[list[int]]] = set()
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="tokenizer")

    async def encode(self, text: Text, *, add_special_tokens: bool) -> list[int]:
        came_s = asyncio.get_running_loop().time()
        if isinstance(text, str):
            work = partial(self._encode, text, add_special_tokens)
        else:
            work = partial(self._encode_pieces, text)
        return await self._do(text_length(text), came_s, work)

    def control_tokens(self, printed: str) -> ControlTokens:
        added = self._tokenizer.get_added_tokens_decoder().values()
        control = ControlTokens(
            ControlToken(each.content, each.special, each.lstrip, each.rstrip)
            for each in added
            if each.special or (each.content in printed and _is_markup(each.content))
        )
        self._plain = PlainTokenizer(self._tokenizer, control.texts)
        return control

    async def exceeds(self, text: str, most_tokens: int) -> bool:
        if len(text) <= LIKELY_CHARS * most_tokens:
            return False
        counted, came_s = 0, asyncio.get_running_loop().time()
        for part in _slices(text):
            tokens = await self._do(len(text), came_s, partial(self._encode, part, False))
            counted += len(tokens) - CUT_TOKENS
            if counted > most_tokens:
                return True
        return False

    async def _do(self, chars: int, came_s: float, work: Callable[[], list[int]]) -> list[int]:
        """Have a thread do the work in its turn; it is of a text of so many characters."""
        job = EncodeJob(chars, came_s, work, asyncio.get_running_loop().create_future())
        displaced = self._queue.put(job)
        if displaced is not None and not displaced.answer.done():
            displaced.answer.set_exception(
                Overloaded("too many prompts of this API key wait for tokenization: send fewer")
            )
        self._start()
        try:
            return await job.answer  # bounded by the caller's deadline
        except asyncio.CancelledError:
            self._queue.discard(job)
            raise

    def _start(self) -> None:
        while (job := self._queue.next()) is not None:
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            self._running.add(running)
            running.add_done_callback(partial(self._ended, job))

    def _ended(self, job: EncodeJob, running: asyncio.Future[list[int]]) -> None:
        """Its thread is free; a job whose caller has left has counted until now."""
        self._running.discard(running)
        self._queue.ended(job)
        if running.cancelled():
            job.answer.cancel()
            return  # the tokenizer is closed
        error = running.exception()
        if not job.answer.done():
            if error is None:
                job.answer.set_result(running.result())
            else:
                job.answer.set_exception(error)
        self._start()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # a batch of one: for a single text the library keeps the interpreter's lock, and a
            # long prompt would stop every other request and all heartbeats
            (encoding,) = self._tokenizer.encode_batch(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("the text is not Unicode: send valid UTF-8") from error
        ids: list[int] = encoding.ids
        return ids

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        assert self._plain is not None  # who has pieces has asked for control tokens
        tokens: list[int] = []
        for place, piece in enumerate(pieces):
            if piece.plain:
                tokens += self._plain.encode(piece.text, first=place == 0)
            else:
                tokens += self._encode(piece.text, False)
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        if self._byte_level is not None:
            return self._byte_level.get(token, b"")
        piece: str = self._tokenizer.id_to_token(token) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode(errors="replace")

    def detokenizer(self, prompt: Sequence[int], shown: Sequence[str] = ()) -> Detokenizer:
        made: Detokenizer
        if self._byte_level is not None:
            made = ByteDetokenizer(self._byte_level, self._special)
        else:
            made = WindowDetokenizer(self.decode, prompt, self._special)
        ids = ((self._tokenizer.token_to_id(text), text) for text in shown)
        marks = {token: text for token, text in ids if token is not None and token in self._special}
        return MarkingDetokenizer(made, marks) if marks else made

    async def close(self) -> None:
        for running in [*self._running]:
            running.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_markup(text: str) -> bool:
    """Whether it is no word and no white space, which some vocabularies add too."""
    return len(text) > 2 and not text.isspace() and not text.isalnum()


def text_length(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(len(piece.text) for piece in text)


def _slices(text: str) -> Iterator[str]:
    """Cut before a space where there is one near, as tokenizers do."""
    start = 0
    while start < len(text):
        end = start + SLICE_CHARS
        space = text.rfind(" ", end - SLICE_CHARS // 16, end) if end < len(text) else -1
        end = space if space > 0 else end
        yield text[start:end]
        start = end
