"""A tokenizer to which some added tokens are ordinary text.

It shares the vocabulary of the whole tokenizer, so it costs no memory; only the added tokens and
the steps around the vocabulary are made again, without those tokens. Knows no chats. Immutable.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson
import tokenizers

from baton.runtime.errors import InvalidRequest

_EMPTY_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


class PlainTokenizer:
    """The tokenizer `whole` without the added tokens of the texts `unknown`."""

    def __init__(self, whole: tokenizers.Tokenizer, unknown: Collection[str]) -> None:
        added = whole.get_added_tokens_decoder()
        self._unknown = {t: each.content for t, each in added.items() if each.content in unknown}
        kept = [each for _, each in sorted(added.items()) if each.content not in unknown]
        description = orjson.loads(whole.to_str())
        self._first = _stripped(whole, description, kept)
        self._later = _stripped(whole, _without_prefix(description), kept)
        self._ids = {  # from ids of this tokenizer to those of the whole one
            self._first.token_to_id(each.content): token
            for token, each in added.items()
            if each.content not in unknown
        }

    def encode(self, text: str, first: bool) -> list[int]:
        """Encode a text, which begins the prompt if `first`. Raises InvalidRequest if only a
        control token could represent it."""
        tokenizer = self._first if first else self._later
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
        tokens = [self._ids.get(token, token) for token in encoding.ids]
        for token in tokens:
            if token in self._unknown:
                raise InvalidRequest(
                    f"messages: the model's tokenizer cannot write {self._unknown[token]!r} as "
                    "text: leave it out",
                    "messages",
                )
        return tokens


def _stripped(
    whole: tokenizers.Tokenizer, description: dict[str, Any], kept: list[tokenizers.AddedToken]
) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(
        orjson.dumps(
            {
                **description,
                "added_tokens": [],
                "post_processor": None,
                "truncation": None,
                "padding": None,
                "model": _EMPTY_MODEL,
            }
        ).decode()
    )
    made.model = whole.model
    made.add_tokens(kept)
    return made


def _without_prefix(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description without the space that only the first text of a prompt gets."""
    found = description.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found])
    bare = [
        {**step, "prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step
        for step in steps
    ]
    if bare == steps:
        return description
    made = {**found, "pretokenizers": bare} if "pretokenizers" in found else bare[0]
    return {**description, "pre_tokenizer": made}
