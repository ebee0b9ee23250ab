"""A small model that proposes for a large one, from its own KV in the same blocks.

    slice: tokens [t], start p          pass 0: what is missing, then t   ──▶ q1, drawn for p + 1
                                        pass 1: q1                        ──▶ q2, drawn for p + 2
                                        ...       the target then verifies t, q1, q2, ...

Each proposal is a draw by the rules, the history and the noise of the target's own draw at that
position: two models that agree on a distribution then agree on the token. So the output does not
depend on this model. The last proposal's own KV is not computed here; where it is accepted, the
next slice names it as missing. Knows no request; the device thread alone calls it.

A draft model that does not fit its target would propose tokens that the target never draws and slow
every step down, silently: `check_pair` refuses it at start-up, by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.sampling.draw_plan import Sampler
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.speculation.pending_draft import PendingDraft, draw_proposals
from baton.runtime.errors import ModelError


class DraftDecoder(Protocol):
    """Computes a draft model: `Decoder`, or several ranks' ones."""

    def hidden(self, layout: StepLayout) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class DraftModel:
    """`pool` is the draft's group of the target's pool, `max_context` the target's."""

    def __init__(
        self,
        spec: ModelSpec,
        decoder: DraftDecoder,
        pool: KvPool,
        max_context: int,
        sampler: Sampler,
    ) -> None:
        self.spec = spec
        self._decoder, self._pool, self._sampler = decoder, pool, sampler
        self._bounds = Bounds(pool.blocks, pool.block_size, spec.vocab_size, max_context)

    def run(self, slices: Sequence[Slice]) -> dict[int, tuple[int, ...]]:
        """Compute the KV that slices ask for, and return the proposals of each that wants some, by
        its index. A draft ends early where logits are not finite. Raises EngineError, before
        anything is written, if a slice breaks its bounds."""
        computed: list[Slice] = []
        drafts: dict[int, PendingDraft] = {}
        for index, item in enumerate(slices):
            if item.draft is None:
                continue
            missing, wanted = item.draft.missing, item.draft.tokens
            tokens = (*missing, *item.tokens)
            whole = Slice(tokens, item.start - len(missing), item.blocks)
            if wanted:
                drafts[index] = PendingDraft(item.draws, wanted, whole)
            else:
                computed.append(whole)
        live = list(drafts.values())
        while live or computed:
            self._pass(live, computed)
            live, computed = [draft for draft in live if not draft.ended], []
        return {index: tuple(draft.proposed) for index, draft in drafts.items()}

    def follow(self, slices: Sequence[Slice]) -> None:
        """Compute nothing after the target: `run` has computed all that slices ask for."""

    def _pass(self, drafts: Sequence[PendingDraft], computed: Sequence[Slice]) -> None:
        """Compute the slices of both and draw a token for each draft; one whose logits are not
        finite has ended."""
        slices = (*(draft.slice for draft in drafts), *computed)
        layout = lay_out(StepBatch(slices), self._bounds)
        device = self._pool.tensor.device
        hidden = self._decoder.hidden(layout if device.type == "cpu" else layout.to(device))
        if not drafts:
            return
        rows = [layout.spans[index][1] - 1 for index in range(len(drafts))]
        draw_proposals(drafts, self._decoder.logits(hidden[rows]), self._sampler)


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
