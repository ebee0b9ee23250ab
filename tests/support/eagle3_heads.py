"""EAGLE-3 heads in plain PyTorch, written from the published formulas, and their two layouts.

A reference that shares no code with the engine: whole sequences at once, its own rotation and
attention. `train` fits a head to what its target said of some texts, in a second or two, so that
proposals are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from tests.support.model_story import random_prompt
from tests.support.small_models import make_model

Layout = Literal["midlayer", "speculators"]
TEXT_TOKENS = 72  # of a prompt and its answer, in training


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head, and of the target that it reads."""

    vocab: int
    target_hidden: int
    layers: tuple[int, int, int]  # of the target, whose inputs it reads
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 96
    draft_vocab: int = 0  # 0: the target's
    norm_before_residual: bool = False
    own_embedding: bool = True
    theta: float = 10_000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def drafted(self) -> int:
        return self.draft_vocab or self.vocab


class ReferenceHead(nn.Module):
    """Whole sequences, of one length; row i of what it computes belongs to token i + 1."""

    def __init__(self, shape: HeadShape, embedding: Tensor | None = None) -> None:
        """`embedding` [vocab, hidden]: the target's, where the head has none of its own."""
        super().__init__()
        self.shape = shape
        hidden, dim = shape.hidden, shape.head_dim
        self.fc = nn.Linear(3 * shape.target_hidden, hidden, bias=False)
        self.q = nn.Linear(2 * hidden, shape.heads * dim, bias=False)
        self.k = nn.Linear(2 * hidden, shape.kv_heads * dim, bias=False)
        self.v = nn.Linear(2 * hidden, shape.kv_heads * dim, bias=False)
        self.o = nn.Linear(shape.heads * dim, hidden, bias=False)
        self.gate = nn.Linear(hidden, shape.ffn, bias=False)
        self.up = nn.Linear(hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, shape.drafted, bias=False)
        if embedding is None:
            embedding = torch.randn(shape.vocab, hidden)
        self.embedding = nn.Parameter(embedding.detach().clone(), shape.own_embedding)
        self.input_norm, self.hidden_norm, self.mlp_norm, self.final_norm = (
            nn.Parameter(1 + 0.2 * torch.randn(hidden)) for _ in range(4)
        )
        # every so many of the target's tokens, and an uneven start
        step = shape.vocab // shape.drafted
        self.register_buffer("ids", torch.arange(shape.drafted) * step + (step > 1))

    def features(self, states: Tensor) -> Tensor:
        """[.., tokens, 3 x target hidden] to [.., tokens, hidden]."""
        fused: Tensor = self.fc(states)
        return fused

    def forward(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(logits over the draft vocabulary, states before the last norm) of `tokens` [.., n] 1 to
        n, by the features of tokens 0 to n - 1."""
        shape, count = self.shape, tokens.shape[-1]
        embedded = self._norm(self.embedding[tokens], self.input_norm)
        normed = self._norm(features, self.hidden_norm)
        both = torch.cat((embedded, normed), -1)
        queries, keys, values = (
            linear(both).unflatten(-1, (-1, shape.head_dim)).transpose(-3, -2)
            for linear in (self.q, self.k, self.v)
        )
        queries, keys = self._turn(queries), self._turn(keys)
        group = shape.heads // shape.kv_heads
        keys, values = keys.repeat_interleave(group, -3), values.repeat_interleave(group, -3)
        scores = queries @ keys.transpose(-2, -1) / shape.head_dim**0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        x = self.o(mixed.transpose(-3, -2).flatten(-2))
        x = x + (normed if shape.norm_before_residual else features)
        y = self._norm(x, self.mlp_norm)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return self.lm_head(self._norm(x, self.final_norm)), x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.eps) * weight

    def _turn(self, x: Tensor) -> Tensor:
        half = self.shape.head_dim // 2
        frequencies = self.shape.theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[-2])[:, None] * frequencies
        low, high = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def train(
    head: ReferenceHead, tokens: Tensor, states: Tensor, logits: Tensor, steps: int = 80
) -> None:
    """Fit a head to texts of `tokens` [texts, n], with the target's `states` and `logits` [texts,
    n, ..], also for a second pass that reads the head's own state."""
    learner = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], 6e-3)
    wanted = logits[:, 1:, head.get_buffer("ids")].softmax(-1)
    for _ in range(steps):
        found, own = head(tokens[:, 1:], head.features(states[:, :-1]))
        again, _ = head(tokens[:, 2:], own[:, :-1])
        loss = -(wanted * found.log_softmax(-1)).sum(-1).mean()
        loss = loss - (wanted[:, 1:] * again.log_softmax(-1)).sum(-1).mean()
        learner.zero_grad()
        loss.backward()
        learner.step()


def save_head(head: ReferenceHead, folder: Path, layout: Layout, **changes: Any) -> Path:
    """Write a head as its publishers do. `changes` of the top of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, base = head.shape, "midlayer" if layout == "midlayer" else "layers.0"
    names = {
        "fc": head.fc,
        "lm_head": head.lm_head,
        **{f"{base}.self_attn.{name}_proj": getattr(head, name) for name in "qkvo"},
        **{f"{base}.mlp.{name}_proj": getattr(head, name) for name in ("gate", "up", "down")},
    }
    tensors = {f"{name}.weight": linear.weight for name, linear in names.items()}
    tensors["norm.weight"] = head.final_norm
    for name, norm in (
        ("input_layernorm", head.input_norm),
        ("hidden_norm", head.hidden_norm),
        ("post_attention_layernorm", head.mlp_norm),
    ):
        tensors[f"{base}.{name}.weight"] = norm
    if shape.own_embedding:
        tensors["embed_tokens.weight"] = head.embedding
    ids = head.get_buffer("ids")
    if shape.draft_vocab:
        tensors["d2t"] = ids - torch.arange(shape.drafted)
        tensors["t2d"] = torch.isin(torch.arange(shape.vocab), ids)
    kept = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**_config(shape, layout), **changes}))
    return folder


def _config(shape: HeadShape, layout: Layout) -> dict[str, Any]:
    layer = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
    }
    if layout == "midlayer":
        assert not shape.norm_before_residual
        outputs = [layer_id - 1 for layer_id in shape.layers]
        return {
            **layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": shape.drafted,
            "target_hidden_size": shape.target_hidden,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": outputs,
                "use_aux_hidden_state": True,
            },
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        "transformer_layer_config": {**layer, "architectures": None},
        "draft_vocab_size": shape.drafted,
        "target_hidden_size": shape.target_hidden,
        "norm_before_residual": shape.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
    }


def states_of(
    model: torch.nn.Module, tokens: Sequence[int], layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(inputs of `layers` [tokens, 3 hidden], logits [tokens, vocab]) of a transformers model; the
    number of its layers stands for the output of the last."""
    seen: dict[int, Tensor] = {}
    parts: Iterable[torch.nn.Module] = model.get_submodule("model.layers").children()
    hooks = [
        part.register_forward_hook(
            lambda _, inputs, output, index=index: seen.update(
                {
                    index: inputs[0][0],
                    index + 1: (output[0] if isinstance(output, tuple) else output)[0],
                }
            )
        )
        for index, part in enumerate(parts)
    ]
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[index] for index in sorted(layers)], -1), logits


@dataclass(frozen=True)
class TrainedPair:
    """A small random target, a head that knows its answers to `prompts`, and these answers."""

    target: Path
    head: Path
    prompts: list[list[int]]
    greedy: list[list[int]]


def train_pair(folder: Path, layout: Layout = "midlayer") -> TrainedPair:
    """Make a target and train a head on its greedy answers."""
    reference = make_model("qwen3", folder / "target")
    prompts = [random_prompt(length, seed=length) for length in (21, 33, 14)]
    greedy = [reference.greedy(prompt, TEXT_TOKENS - len(prompt)) for prompt in prompts]
    tokens = [[*prompt, *answer] for prompt, answer in zip(prompts, greedy, strict=True)]
    shape = HeadShape(199, 64, (1, 2, 3))
    read = [states_of(reference.model, text, shape.layers) for text in tokens]
    states, logits = (torch.stack(parts) for parts in zip(*read, strict=True))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = ReferenceHead(shape)
        train(head, torch.tensor(tokens), states, logits)
    return TrainedPair(folder / "target", save_head(head, folder / "head", layout), prompts, greedy)
