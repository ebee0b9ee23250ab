"""The arrays that a Triton attention backend prepares for a step, for tests without a GPU.

A step's arrays pass between the backend and its kernels alone. Where no kernel runs, tests look at
the arrays themselves, by this module only.
"""

from __future__ import annotations

from baton.engine.model.step_layout import StepLayout
from baton.engine.triton.attention_backend import TritonAttention, _AttentionStep
from baton.engine.triton.mla_backend import TritonLatentAttention, _MlaStep


def attention_step(attention: TritonAttention, layout: StepLayout) -> _AttentionStep:
    """Return the arrays of `layout`; every layer of a step gets the same ones."""
    return attention._prepared(layout)


def latent_step(attention: TritonLatentAttention, layout: StepLayout) -> _MlaStep:
    """Same as `attention_step`, for latent attention."""
    return attention._prepared(layout)


def splits_sequences(attention: TritonAttention) -> bool:
    """Return whether it has buffers for the parts of long sequences."""
    return attention._buffers is not None
