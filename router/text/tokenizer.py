"""The `Tokenizer` interface: from text to token ids, and back piece by piece.

`HfTokenizer` implements it with Hugging Face `tokenizers`; encoding runs in two threads of its
own with a bounded queue (encode_queue.py), so that a long prompt delays no other request. A
prompt whose request has ended leaves the queue at once, but counts while a thread encodes it. A
text that is most likely too long is first counted slice by slice.

Special tokens in a completion's prompt are read as special tokens, as in other OpenAI-compatible
servers: completion clients depend on it. In a chat's messages they are text (control_tokens.py).
Owns the thread pool; `close` ends it.
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

from baton.router.text.control_tokens import ControlToken, ControlTokens, PromptPiece
from baton.router.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    SpecialTokenDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)
from baton.router.text.encode_queue import EncodeJob, EncodeQueue
from baton.router.text.plain_tokenizer import PlainTokenizer
from baton.runtime.errors import InvalidRequest, ModelError, Overloaded

ENCODE_THREADS = 2
QUEUE_PROMPTS = 256  # waiting for a thread
LIKELY_CHARS_PER_TOKEN = 6  # a text that needs more to fit the context is counted first
SLICE_CHARS = 1 << 16  # counted in one call: some 50 ms of a thread
EXTRA_SLICE_TOKENS = 64  # that a slice may have more than its part of the whole text


Text = str | Sequence[PromptPiece]


class Tokenizer(Protocol):
    """`vocab_size` includes added tokens. All methods but `encode` and `exceeds` are fast."""

    vocab_size: int
    longest_token_bytes: int

    async def encode(self, text: Text, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids. Raises InvalidRequest for text that is not Unicode, or that only
        control tokens could represent; Overloaded if too many texts wait."""
        ...

    def control_tokens(self, printed: str) -> ControlTokens:
        """Return the special tokens, and the other added tokens that occur in `printed`. After
        this call `encode` accepts pieces in which they are text."""
        ...

    async def exceeds(self, text: str, most_tokens: int) -> bool:
        """Return whether the text certainly has more tokens; False at once if it is short enough
        to be encoded. Raises the same as `encode`."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the token's bytes inside a text; they may be a part of a character."""
        ...

    def token_id(self, text: str) -> int | None:
        """Return the added token that stands for this whole text, such as <tool_call>, if there is
        one."""
        ...

    def detokenizer(self, prompt: Sequence[int], shown: Sequence[str] = ()) -> Detokenizer:
        """Return an incremental detokenizer for an output that follows `prompt`. It leaves out
        special tokens, except for those with the texts `shown`."""
        ...

    async def close(self) -> None: ...


class HfTokenizer:
    """The tokenizer of a tokenizer.json; at most `queue` prompts wait. Raises ModelError if the
    file cannot be read."""

    def __init__(self, path: Path, queue: int = QUEUE_PROMPTS) -> None:
        # Without this a batch, even of one text, starts a thread for each core.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read ({error}): download it again") from error
        # The router refuses long prompts with an error; the tokenizer must not shorten them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, each in added.items() if each.special)
        self._added = {each.content: token for token, each in added.items()}
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
        arrival_s = asyncio.get_running_loop().time()
        if isinstance(text, str):
            work = partial(self._encode, text, add_special_tokens)
        else:
            work = partial(self.encode_pieces, text)
        return await self._do(text_length(text), arrival_s, work)

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
        if len(text) <= LIKELY_CHARS_PER_TOKEN * most_tokens:
            return False
        counted, arrival_s = 0, asyncio.get_running_loop().time()
        for part in _slices(text):
            tokens = await self._do(len(text), arrival_s, partial(self._encode, part, False))
            counted += len(tokens) - EXTRA_SLICE_TOKENS
            if counted > most_tokens:
                return True
        return False

    async def _do(self, chars: int, arrival_s: float, work: Callable[[], list[int]]) -> list[int]:
        """Queue the work on a text of so many characters, and return a thread's result."""
        job = EncodeJob(chars, arrival_s, work, asyncio.get_running_loop().create_future())
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
        """Free the job's thread, which was in use even if the caller was cancelled."""
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
            # A batch of one: for a single text the library holds the interpreter's lock, and a
            # long prompt would stop every other request and all heartbeats.
            (encoding,) = self._tokenizer.encode_batch(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("the text is not Unicode: send valid UTF-8") from error
        ids: list[int] = encoding.ids
        return ids

    def encode_pieces(self, pieces: Sequence[PromptPiece]) -> list[int]:
        """Return the tokens of `pieces`, after `control_tokens` was called."""
        assert self._plain is not None  # set by `control_tokens`, before any pieces
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            if piece.plain:
                tokens += self._plain.encode(piece.text, first=index == 0)
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

    def token_id(self, text: str) -> int | None:
        return self._added.get(text)

    def detokenizer(self, prompt: Sequence[int], shown: Sequence[str] = ()) -> Detokenizer:
        made: Detokenizer
        if self._byte_level is not None:
            made = ByteDetokenizer(self._byte_level, self._special)
        else:
            made = WindowDetokenizer(self.decode, prompt, self._special)
        ids = ((self._tokenizer.token_to_id(text), text) for text in shown)
        marks = {token: text for token, text in ids if token is not None and token in self._special}
        return SpecialTokenDetokenizer(made, marks) if marks else made

    async def close(self) -> None:
        for running in [*self._running]:
            running.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_markup(text: str) -> bool:
    """Return whether an added token is no word and no white space, which some models add."""
    return len(text) > 2 and not text.isspace() and not text.isalnum()


def text_length(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(len(piece.text) for piece in text)


def _slices(text: str) -> Iterator[str]:
    """Split the text, before a space if one is near, as tokenizers do."""
    start = 0
    while start < len(text):
        end = start + SLICE_CHARS
        space = text.rfind(" ", end - SLICE_CHARS // 16, end) if end < len(text) else -1
        end = space if space > 0 else end
        yield text[start:end]
        start = end
