"""A graph's kernels in plain torch, row by row: what runs where Triton does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from baton.engine.execution.decode_graph import DrawKernels
from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers
from baton.engine.sampling.mask_words import MASKED_LOGIT, MaskWords


def around(draw: Callable[..., None]) -> DrawKernels:
    """The kernels of a graph whose `draw` knows no masks."""

    def draw_masked(logits: torch.Tensor, *rest: Any) -> None:
        *known, masks = rest
        mask(logits, masks)
        draw(logits, *known)

    return DrawKernels(adjust, draw_masked, find_logprobs)


def mask(logits: torch.Tensor, masks: MaskWords | None) -> None:
    if masks is None:
        return
    for row, index in enumerate(masks.rows.tolist()):
        if index >= 0:
            bits = np.unpackbits(masks.words[index].numpy().view(np.uint8), bitorder="little")
            barred = torch.from_numpy(bits[: logits.shape[1]] == 0)
            logits[row].masked_fill_(barred, MASKED_LOGIT)


def adjust(logits: torch.Tensor, adjustments: Adjustments) -> None:
    for row, (first, seen, counted, biased) in enumerate(adjustments.bounds.T.tolist()):
        repetition, frequency, presence = adjustments.penalties[:, row].tolist()
        fed = adjustments.pending_token[row : row + 1].tolist()
        tokens, amounts = (
            adjustments.tokens[first:biased].tolist(),
            adjustments.amounts[first:biased],
        )
        for token in {*tokens[: seen - first], *[f for f in fed if f >= 0]}:
            x = logits[row, token]
            logits[row, token] = x * repetition if x < 0 else x / repetition
        output = slice(seen - first, counted - first)
        counts = dict(zip(tokens[output], amounts[output].tolist(), strict=True))
        for token in fed:
            if token >= 0:
                counts[token] = counts.get(token, 0) + 1
        for token, count in counts.items():
            logits[row, token] -= frequency * count + presence
        for index in range(counted - first, biased - first):
            logits[row, tokens[index]] += amounts[index]


def find_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, buffers: LogprobBuffers
) -> None:
    for row, count in enumerate(counts.tolist()):
        if count < 0:
            continue
        logprobs = logits[row].log_softmax(-1)
        buffers.values[row, 0] = logprobs[tokens[row]]
        best = logprobs.topk(count)
        buffers.values[row, 1 : count + 1], buffers.tokens[row, 1 : count + 1] = best
