"""The engine's GPU kernels against what they must compute, on a GPU or in Triton's interpreter.

A check makes fresh random inputs, and returns its error and the largest one that is allowed.
Memory from torch is poisoned with NaN first where a kernel must write all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from parity import Check
from torch import Tensor

from baton.engine.model.quantized_weight import QuantizedWeight
from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MASKED_LOGIT, MaskWords
from baton.engine.sampling.sampling import adjust, sample
from baton.engine.scheduling.batch import Draw, SamplingParams
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.checksum import block_checksums
from baton.engine.triton.experts import expert_matmul, expert_matmul_reference, sort_by_expert
from baton.engine.triton.gate import gated, gated_reference
from baton.engine.triton.norm import add_rms_norm, rms_norm
from baton.engine.triton.quantized import (
    TritonQuantized,
    dequantized,
    dequantized_reference,
    quantized_matmul,
)
from baton.engine.triton.sampling import draw_tokens

CHECKS: dict[str, Check] = {}
_KINDS = {"fp32": (torch.float32, 2e-5), "bf16": (torch.bfloat16, 1e-2)}


def check(name: str) -> Callable[[Check], Check]:
    def keep(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return keep


def error(out: Tensor, reference: Tensor) -> float:
    """Norm of the difference over norm of the reference, in float64; NaN counts as infinite."""
    wide, wanted = out.double().cpu(), reference.double().cpu()
    if wide.shape != wanted.shape:
        raise ValueError(f"shape {list(wide.shape)} instead of {list(wanted.shape)}")
    found = float((wide - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return found if found == found else float("inf")


@contextmanager
def poisoned() -> Iterator[None]:
    """Every `torch.empty` is filled with NaN (the largest number, where integers) meanwhile."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    was, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(was, warn_only=warned)


def _norm(kind: str, offset: float) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        rows, size = (3, 72) if tiny else (257, 4096)
        x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(size, device=device).to(dtype)
        with poisoned():
            out, total = add_rms_norm(x, residual, weight, 1e-6, offset)
        wide = (x + residual).double()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        wanted = wide * scale * (weight.double() + offset)
        return max(error(out, wanted), error(total, x + residual)), allowed

    return run


for _kind in _KINDS:
    CHECKS[f"add_rms_norm {_kind}"] = _norm(_kind, 0.0)
CHECKS["add_rms_norm one plus weight"] = _norm("fp32", 1.0)


@check("rms_norm of heads inside a wider row")
def _norm_heads(device: torch.device, tiny: bool) -> tuple[float, float]:
    rows, heads, size = (5, 3, 24) if tiny else (300, 32, 128)
    x = torch.randn(rows, heads + 2, size, device=device)[:, 1 : heads + 1]
    weight = torch.randn(size, device=device)
    with poisoned():
        out = rms_norm(x, weight, 1e-5)
    wide = x.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    return error(out, wanted), 2e-5


def _gate(kind: str, activation: str) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        rows, width = (3, 1100) if tiny else (257, 14336)
        x = (torch.randn(rows, 2 * width, device=device) * 3).to(dtype)
        with poisoned():
            out = gated(x, activation)  # type: ignore[arg-type]
        return error(out, gated_reference(x.double(), activation)), allowed  # type: ignore[arg-type]

    return run


for _kind in _KINDS:
    for _activation in ("silu", "gelu_tanh"):
        CHECKS[f"gated {_activation} {_kind}"] = _gate(_kind, _activation)


def _experts(kind: str, gather: bool, per_expert: int) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        experts, width, depth = (5, 80, 72) if tiny else (64, 1536, 2048)
        tokens, choices = max(1, per_expert * experts // 2), 2
        weights = (torch.randn(experts, width, depth, device=device) / depth**0.5).to(dtype)
        # The last two experts are left out: an expert without rows must cost and change nothing.
        chosen = torch.rand(tokens, experts - 2, device=device).topk(choices, dim=-1).indices
        order, offsets = sort_by_expert(chosen, experts)
        x = torch.randn(tokens if gather else tokens * choices, depth, device=device).to(dtype)
        source = order // choices if gather else None
        with poisoned():
            out = expert_matmul(x, weights, offsets, source)
        wanted = expert_matmul_reference(x.double(), weights.double(), offsets, source)
        return error(out, wanted), allowed

    return run


CHECKS["expert_matmul fp32 gathered, few rows"] = _experts("fp32", True, 2)
CHECKS["expert_matmul bf16 gathered, few rows"] = _experts("bf16", True, 2)
CHECKS["expert_matmul bf16 sorted, many rows"] = _experts("bf16", False, 20)


def _packed(
    packing: str, width: int, depth: int, group: int, zeros: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    scales = torch.rand(width, depth // group, device=device) * 0.02 + 0.001
    zero = torch.randint(0, 16, scales.shape, device=device).float() if zeros else None
    if packing == "int8":
        return torch.randint(-127, 128, (width, depth), device=device).to(torch.int8), scales, zero
    if packing == "int4":
        half = torch.randint(0, 256, (width, depth // 2), device=device).to(torch.uint8)
        return half, scales, zero
    return torch.randn(width, depth, device=device).to(torch.float8_e4m3fn), scales, zero


def _quantized(packing: str, kind: str, rows: int, group: int, zeros: bool) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        width, depth = (72, max(256, group)) if tiny else (4096, 4096)
        size = group or depth
        values, scales, zero = _packed(packing, width, depth, size, zeros, device)
        x = torch.randn(rows, depth, device=device).to(dtype)
        bias = torch.randn(width, device=device).to(dtype)
        with poisoned():
            out = quantized_matmul(x, values, scales, packing, zero, bias)  # type: ignore[arg-type]
        matrix = dequantized_reference(values, scales, packing, zero, torch.float64)  # type: ignore[arg-type]
        return error(out, x.double() @ matrix.T + bias.double()), allowed

    return run


@check("quantized weight as loaded, last group cut, columns permuted")
def _loaded(device: torch.device, tiny: bool) -> tuple[float, float]:
    depth = 176 if tiny else 4048
    codes = torch.randint(0, 256, (40, depth // 2), dtype=torch.uint8)
    groups = -(-depth // 64)
    scales, zeros = torch.rand(40, groups), torch.randint(0, 16, (40, groups)).to(torch.int16)
    weight = QuantizedWeight("int4", codes, scales, 64, zeros, torch.randperm(depth))
    x = torch.randn(3, depth, device=device)
    with poisoned():
        out = TritonQuantized(weight, torch.ones(40), device)(x)
    return error(out, x.double().cpu() @ weight.dequantized(torch.float64).T + 1), 2e-5


CHECKS["quantized int8 by channel, 1 row, fp32"] = _quantized("int8", "fp32", 1, 0, False)
CHECKS["quantized int8 by groups of 32, 5 rows, bf16"] = _quantized("int8", "bf16", 5, 32, False)
CHECKS["quantized int4 with zeros, 3 rows, fp32"] = _quantized("int4", "fp32", 3, 64, True)
CHECKS["quantized int4 about 8, 17 rows, bf16"] = _quantized("int4", "bf16", 17, 128, False)
CHECKS["quantized int4 by groups of 16, 2 rows, fp32"] = _quantized("int4", "fp32", 2, 16, True)
CHECKS["quantized fp8 by channel, 2 rows, fp32"] = _quantized("fp8", "fp32", 2, 0, False)
CHECKS["quantized fp8 by groups, 65 rows, bf16"] = _quantized("fp8", "bf16", 65, 128, False)


@check("every E4M3 number is decoded exactly")
def _decoded(device: torch.device, tiny: bool) -> tuple[float, float]:
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    bits = bits[(bits & 0x7F) != 0x7F].repeat(8)[: 16 * 127].view(1, -1)  # without its NaN
    values = bits.view(torch.float8_e4m3fn)
    scales = torch.ones(1, 1, device=device)
    with poisoned():
        out = dequantized(values, scales, "fp8", None, torch.float32)
    return float((out != values.to(torch.float32)).sum()), 0.0


_RULES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.9),
    "top-k": SamplingParams(temperature=1.3, top_k=7),
    "top-p": SamplingParams(temperature=0.8, top_p=0.7),
    "min-p": SamplingParams(temperature=1.1, min_p=0.05),
    "all": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02),
    "nothing kept but the best": SamplingParams(temperature=1.0, top_p=0.0),
    "nearly all": SamplingParams(temperature=2.0, top_p=0.9999),
    "all but one": SamplingParams(temperature=1.0, top_k=198),
}


def _draws(name: str) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        rows, vocab = (6, 199) if tiny else (128, 151_936)
        logits = torch.randn(rows, vocab, device=device) * 2
        logits[0, vocab // 2 :] = logits[0, : vocab - vocab // 2].clone()  # ties
        logits[1], logits[2] = -7.25, 0.0
        logits[2, 5], logits[2, 7:9] = 9e4, -0.0
        logits[3, ::2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
        logits[3, 1::2] = 1.0
        params = _RULES[name]
        draws = []
        for row in range(rows):
            own = SamplingParams(
                params.temperature, params.top_k, params.top_p, params.min_p, seed=row * 7919 - 3
            )
            draws.append(Draw(row % 3, (1 << 40) * (row % 2) + row, own))
        tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
        finite = torch.full((rows,), -1, dtype=torch.int8, device=device)
        draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite)
        wanted = [drawn.token for drawn in sample(logits.cpu(), draws)]
        wrong = sum(a != b for a, b in zip(tokens.tolist(), wanted, strict=True))
        # On a GPU products and exponentials may differ in their last bit: a near tie may flip.
        return float(wrong + int((finite != 1).sum())), 0.0 if tiny else 1.0

    return run


for _name in _RULES:
    CHECKS[f"draws: {_name}"] = _draws(_name)


@check("draws: alone as in any slot of a batch")
def _slots(device: torch.device, tiny: bool) -> tuple[float, float]:
    logits = torch.randn(5, 150 if tiny else 32_000, device=device)
    params = [SamplingParams(1.1, top_p=0.8, seed=row) for row in range(5)]
    draws = [Draw(0, 7 * row, each) for row, each in enumerate(params)]

    def drawn(rows: list[int]) -> list[int]:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        finite = torch.empty(len(rows), dtype=torch.int8, device=device)
        rules = DrawRules.of([draws[row] for row in rows]).to(device)
        draw_tokens(logits[rows], rules, tokens, finite)
        return tokens.tolist()

    together = drawn([4, 3, 2, 1, 0])[::-1]
    alone = [drawn([row])[0] for row in range(5)]
    return float(sum(a != b for a, b in zip(together, alone, strict=True))), 0.0


@check("draws: rows that are not finite are told, the others unharmed")
def _broken(device: torch.device, tiny: bool) -> tuple[float, float]:
    logits = torch.randn(4, 300, device=device)
    logits[1, 7], logits[2, 299] = float("nan"), float("inf")
    draws = [Draw(0, 5, SamplingParams(seed=row)) for row in range(4)]
    tokens = torch.full((4,), -1, dtype=torch.int64, device=device)
    finite = torch.full((4,), -1, dtype=torch.int8, device=device)
    draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite)
    wanted = sample(logits[[0, 3]].cpu(), [draws[0], draws[3]])
    good = tokens[[0, 3]].tolist() == [drawn.token for drawn in wanted]
    good = good and tokens[[1, 2]].tolist() == [0, 0] and finite.tolist() == [1, 0, 0, 1]
    return 0.0 if good else 1.0, 0.0


def _adjusted(tiny: bool, vocab: int) -> list[Draw]:
    """Draws of every mixture of rules, and of none, each with a text of its own."""
    generator = np.random.default_rng(7)
    prompt, output = (300, 200) if tiny else (40_000, 20_000)  # several pieces of each list
    bias = generator.choice(vocab, 60 if tiny else 1024, replace=False)
    pairs = tuple((int(token), float(np.float32(generator.normal()))) for token in bias)
    draws = []
    for number in range(16):
        params = SamplingParams(
            temperature=0.0,
            repetition_penalty=1.3 if number & 1 else 1.0,
            frequency_penalty=0.37 if number & 2 else 0.0,
            presence_penalty=-0.21 if number & 4 else 0.0,
            logit_bias=pairs if number & 8 else (),
        )
        made = [generator.integers(0, vocab // 2, n).tolist() for n in (prompt, output)]
        text = Text(PromptTokens(made[0]), made[1])
        history = text.until(output) if params.needs_history else None
        draws.append(Draw(0, number, params, history))
    return draws


@check("draws: penalties and biases")
def _penalties(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Bit for bit, with and without a token that the lists miss."""
    vocab = 2_999 if tiny else 151_936
    draws = _adjusted(tiny, vocab)
    before = torch.randn(len(draws), vocab, device=device) * 3
    wrong = 0
    for fed in (None, 1, vocab - 1, draws[1].history.text.output[0]):  # type: ignore[union-attr]
        adjustments, known = Adjustments.of(draws).to(device), draws
        if fed is not None:
            adjustments.pending_token.fill_(fed)
            known = [
                replace(each, history=each.history.extended(fed)) if each.history else each
                for each in draws
            ]
        found, wanted = before.clone(), before.cpu()
        adjust_logits(found, adjustments)
        adjust(wanted, known)
        wrong += int((found.cpu() != wanted).sum())
    return float(wrong), 0.0


class _Admitted:
    """Admits each token that is divisible by `step`."""

    def __init__(self, step: int, bits: int) -> None:
        self._step, self._bits = step, bits

    def bitmask(self) -> bytes:
        found = np.arange(self._bits) % self._step == 0
        return np.packbits(found, bitorder="little").tobytes()

    def extended(self, tokens: Sequence[int]) -> _Admitted:
        return self


@check("draws: masked by grammars")
def _masked(device: torch.device, tiny: bool) -> tuple[float, float]:
    """The tokens of masks on the host, in rows with and without one, and with a shorter one."""
    rows, vocab = (6, 4_203) if tiny else (64, 151_936)
    logits = torch.randn(rows, vocab, device=device) * 2
    lengths = (vocab + -vocab % 32, (vocab - 100) // 32 * 32)
    draws = [
        Draw(0, row, rules, None, None if row % 3 == 2 else _Admitted(row + 2, lengths[row % 2]))
        for row, rules in zip(range(rows), [*_RULES.values()] * rows, strict=False)
    ]
    wanted = sample(logits.clone().cpu(), draws)
    before = logits.clone()
    masks = MaskWords.of(draws, vocab).to(device)
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    finite = torch.full((rows,), -1, dtype=torch.int8, device=device)
    draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite, masks)
    wrong = sum(found != each.token for found, each in zip(tokens.tolist(), wanted, strict=True))
    for row in range(rows):
        steps = torch.arange(vocab, device=device)
        barred = (steps % (row + 2) != 0) | (steps >= lengths[row % 2])
        left = before[row] if row % 3 == 2 else before[row].masked_fill(barred, MASKED_LOGIT)
        wrong += int((logits[row] != left).sum())
    return float(wrong + int((finite != 1).sum())), 0.0


@check("draws: adjusted, with barred tokens")
def _barred(device: torch.device, tiny: bool) -> tuple[float, float]:
    """No rule of a draw trips over a token that must not be drawn."""
    rows, vocab = (6, 199) if tiny else (64, 151_936)
    logits = torch.randn(rows, vocab, device=device) * 2
    best = logits.argmax(dim=-1).tolist()
    draws = []
    for row, rules in zip(range(rows), [*_RULES.values()] * rows, strict=False):
        barred = (best[row], *range(row, vocab, 3))
        params = replace(rules, seed=row, min_tokens=1, barred=barred, top_logprobs=3)
        draws.append(Draw(0, row, params.at(0)))
    wanted = sample(logits.clone().cpu(), draws)  # which overwrites them
    adjust_logits(logits, Adjustments.of(draws).to(device))
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    finite = torch.full((rows,), -1, dtype=torch.int8, device=device)
    draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite)
    wrong = sum(a != b.token for a, b in zip(tokens.tolist(), wanted, strict=True))
    barred_drawn = sum(
        token in dict(draw.params.logit_bias)
        for token, draw in zip(tokens.tolist(), draws, strict=True)
    )
    wrong += 9 * (barred_drawn + int((finite != 1).sum()))
    return float(wrong), 0.0 if tiny else 1.0


@check("draws: logprobs")
def _logprobs(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Ties go to the lowest ids; rows that ask for none are left alone."""
    rows, vocab = (5, 9_001) if tiny else (64, 151_936)
    logits = torch.randn(rows, vocab, device=device) * 3
    logits[1, 5::4096] = logits[1].max() + 1  # all in one lane
    logits[2] = 1.0
    tokens = torch.arange(rows, device=device) * 7
    counts = torch.tensor([(0, 64, 20, -1, 3)[row % 5] for row in range(rows)], device=device)
    room = LogprobBuffers.on(device, rows)
    find_logprobs(logits, tokens, counts, room)
    wanted = logits.cpu().double().log_softmax(-1)
    worst = 0.0
    for row, count in enumerate(counts.tolist()):
        order = logits[row].cpu().sort(descending=True, stable=True).indices[: max(count, 0)]
        best = room.tokens[row, 1 : 1 + len(order)].cpu()
        places = torch.cat([tokens[row : row + 1].cpu(), order]) if count >= 0 else order
        values = room.values[row, : len(places)].cpu()
        if not torch.equal(best.long(), order) or room.values[row, len(places) :].any():
            return float("inf"), 0.0
        worst = max(worst, float((values - wanted[row, places]).abs().max()) if count >= 0 else 0.0)
    return worst, 2e-5


def checksum_reference(
    blocks_of_pool: np.ndarray, blocks: list[int], seeds: list[int], slabs: int
) -> list[list[int]]:
    """nh64-1, written out with Python's integers, from its definition."""
    low64 = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & low64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & low64
        return value ^ (value >> 31)

    sums = []
    for block, seed in zip(blocks, seeds, strict=True):
        row = []
        for slab in blocks_of_pool[block].view(np.uint64).reshape(slabs, -1).tolist():
            product = 0
            for place, word in enumerate(slab):
                keyed = word ^ ((seed + place * 0x9E3779B97F4A7C15) & low64)
                product += (keyed & 0xFFFFFFFF) * (keyed >> 32)
            row.append(mix((product & low64) ^ mix((sum(slab) + seed) & low64)))
        sums.append(row)
    return sums


def _checksums(slab_words: int) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        slabs, seeds = 2, [0, (1 << 64) - 1, 0xDEADBEEF12345678]
        words = np.random.default_rng().integers(0, 256, (5, slabs * slab_words * 8), np.uint8)
        pool = torch.from_numpy(words).to(device)
        signed = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)).to(device)
        blocks = [4, 0, 2]
        with poisoned():
            found = block_checksums(pool, torch.tensor(blocks, device=device), signed, slabs)
        ours = found.cpu().numpy().view(np.uint64).tolist()
        return float(ours != checksum_reference(words, blocks, seeds, slabs)), 0.0

    return run


CHECKS["checksum of one short slab"] = _checksums(37)
CHECKS["checksum summed in parts"] = _checksums(16384 + 1030)
