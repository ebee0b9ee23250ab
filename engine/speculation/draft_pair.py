"""Whether a draft model fits its target: refused at start-up, by name.

A wrong pair would propose tokens that the target never draws and slow every step down, silently.
Reads the folders' configurations and tokenizers; knows no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ModelError

_TOKENIZER = "tokenizer.json"


def check_pair(
    target_folder: Path, target: ModelSpec, draft_folder: Path, draft: ModelSpec, max_context: int
) -> None:
    """Raise ModelError, naming every difference with both values, unless the draft model has the
    target's tokens and reaches `max_context`."""
    wrong = []
    if draft.vocab_size != target.vocab_size:
        wrong.append(f"its vocabulary has {draft.vocab_size} tokens, not {target.vocab_size}")
    elif (token := _first_difference(target_folder, draft_folder)) is not None:
        wrong.append(f"its tokenizer differs, first in token {token}")
    if draft.max_context < max_context:
        wrong.append(f"it has {draft.max_context} tokens of context, not {max_context}")
    if wrong:
        raise ModelError(
            f"the draft model in {draft_folder} does not fit the model in {target_folder}: "
            f"{'; '.join(wrong)}; give a draft model that was made for it, or lower "
            "worker.max_context where the context is too short"
        )


def _first_difference(target_folder: Path, draft_folder: Path) -> int | None:
    """Return the lowest token id that the two tokenizers spell differently; None where they agree
    or where one of the folders has no such file."""
    files = target_folder / _TOKENIZER, draft_folder / _TOKENIZER
    if not all(file.exists() for file in files):
        return None
    contents = [file.read_bytes() for file in files]
    if contents[0] == contents[1]:
        return None
    target, draft = (_spellings(file, text) for file, text in zip(files, contents, strict=True))
    differing = [token for token in {*target, *draft} if target.get(token) != draft.get(token)]
    return min(differing, default=None)


def _spellings(file: Path, content: bytes) -> dict[int, str]:
    """Token ids and their texts, added tokens included."""
    try:
        stored: dict[str, Any] = json.loads(content)
        vocab = stored["model"]["vocab"]
        spelled = (
            vocab.items() if isinstance(vocab, dict) else ((e[0], i) for i, e in enumerate(vocab))
        )
        found = {int(token): str(text) for text, token in spelled}
        found.update({int(each["id"]): str(each["content"]) for each in stored["added_tokens"]})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{file} cannot be read ({error!r}): give the model's own file") from error
    return found
