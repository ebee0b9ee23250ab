"""The time of a step, a transfer and a request's host work, from measured coefficients.

    step      seconds = max(measured, roofline)
      measured  fixed + chunk.per_token_s * n + step.per_sequence_s * B
                + attention.per_pair_s * P + attention.per_context_token_s * K
      fixed     the larger of chunk.fixed_s (if n) and step.fixed_s (if B)
      roofline  max(2 * parameters * (n + B) + pair_flops * P) / flops_per_s,
                    (weight_bytes + kv_bytes_per_token * K) / memory_bytes_per_s)
    transfer  transfer.fixed_s + transfer.per_byte_s * bytes
    host      host.fixed_s + host.per_token_s * prompt tokens, before placement

    n  prompt tokens of the step's chunks        P  query-key pairs of their attention
    B  sequences that get one token              K  tokens of KV that these sequences read

The linear form is the sum of a transformer's parts: products grow with n and B, causal attention
of a prompt with its pairs, attention of decoding with the KV that it reads. The roofline is the
bound of Williams, Waterman and Patterson (CACM 52(4), 2009): no step is faster than its arithmetic
or its memory traffic. Pure: no clock, no I/O. timing_fit.py finds the coefficients,
timing_file.py reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """Seconds of a step with prompt tokens, without attention."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of a step that decodes, without attention."""

    fixed_s: float = 0.0
    per_sequence_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """Seconds of attention: of a query-key pair in a chunk, of a KV token in a decode step."""

    per_pair_s: float = 0.0
    per_context_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """Seconds of one offer's READs."""

    fixed_s: float = 0.0
    per_byte_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostTiming:
    """Seconds of a request on the router before its placement."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device. All zero: no bound. `pair_flops` are those of one query-key pair in all
    layers: 4 * layers * heads * head_dim, a multiplication and an addition each for the score and
    for the value."""

    parameters: float = 0.0  # that a token uses
    pair_flops: float = 0.0
    weight_bytes: float = 0.0
    flops_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, in the units of the module's table."""

    prompt_tokens: int = 0
    pairs: float = 0.0
    sequences: int = 0
    context_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class TimingModel:
    """The coefficients of one model on one kind of worker. `kv_bytes_per_token`: of all layers."""

    name: str
    kv_bytes_per_token: float
    chunk: ChunkTiming
    step: StepTiming
    attention: AttentionTiming = field(default_factory=AttentionTiming)
    transfer: TransferTiming = field(default_factory=TransferTiming)
    host: HostTiming = field(default_factory=HostTiming)
    roofline: Roofline = field(default_factory=Roofline)

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        chunk, step, attention = self.chunk, self.step, self.attention
        fixed = max(
            chunk.fixed_s if work.prompt_tokens else 0.0,
            step.fixed_s if work.sequences else 0.0,
        )
        measured = (
            fixed
            + chunk.per_token_s * work.prompt_tokens
            + step.per_sequence_s * work.sequences
            + attention.per_pair_s * work.pairs
            + attention.per_context_token_s * work.context_tokens
        )
        return max(measured, self.roofline_s(work))

    def roofline_s(self, work: StepWork) -> float:
        """Return the seconds that the device's arithmetic and memory need at least."""
        bound, seconds = self.roofline, 0.0
        if bound.flops_per_s:
            rows = work.prompt_tokens + work.sequences
            flops = 2 * bound.parameters * rows + bound.pair_flops * work.pairs
            seconds = flops / bound.flops_per_s
        if bound.memory_bytes_per_s:
            read = bound.weight_bytes + self.kv_bytes_per_token * work.context_tokens
            seconds = max(seconds, read / bound.memory_bytes_per_s)
        return seconds

    def decode_run_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Return the seconds of `steps` decode steps in a row of the same sequences, which read
        `context_tokens` in the first step and one more each in every later one. A step's time is
        linear in the context, so the mean step is that of the mean context; where the roofline
        takes over within the run, this is a little less than the sum."""
        mean = context_tokens + sequences * (steps - 1) / 2
        return steps * self.step_s(StepWork(sequences=sequences, context_tokens=mean))

    def transfer_s(self, tokens: int) -> float:
        """Return the seconds of the READs of one offer."""
        return self.transfer.fixed_s + self.transfer.per_byte_s * tokens * self.kv_bytes_per_token

    def scaled(self, factor: float) -> TimingModel:
        """Return the model of a worker and host that take `factor` times as long for everything."""
        bound = self.roofline
        return replace(
            self,
            chunk=ChunkTiming(self.chunk.fixed_s * factor, self.chunk.per_token_s * factor),
            step=StepTiming(self.step.fixed_s * factor, self.step.per_sequence_s * factor),
            attention=AttentionTiming(
                self.attention.per_pair_s * factor, self.attention.per_context_token_s * factor
            ),
            transfer=TransferTiming(
                self.transfer.fixed_s * factor, self.transfer.per_byte_s * factor
            ),
            host=HostTiming(self.host.fixed_s * factor, self.host.per_token_s * factor),
            roofline=replace(
                bound,
                flops_per_s=bound.flops_per_s / factor,
                memory_bytes_per_s=bound.memory_bytes_per_s / factor,
            ),
        )

    def host_s(self, prompt_tokens: int) -> float:
        """Return the seconds from a request's arrival to its placement."""
        return self.host.fixed_s + self.host.per_token_s * prompt_tokens
