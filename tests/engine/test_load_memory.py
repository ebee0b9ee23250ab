"""The peak of memory while a model loads, measured in a process of its own.

Counted are the pages that are the process's own (RssAnon and RssShmem), sampled by a thread,
and, with the pages of mapped files, the kernel's own highest mark (VmHWM). A small model is
loaded first: libraries, compiled code and threads are there before anything is counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = """
import sys, threading, time
from pathlib import Path
import torch
from baton.engine.memory.host_memory import resident_bytes
from baton.engine.cpu.linear import CpuMatrices
from baton.engine.spec.model_spec import read_spec
from baton.engine.checkpoint.weights import load_weights

def highest():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

def load(folder, made):
    return load_weights(folder, read_spec(folder), torch.bfloat16, CpuMatrices(), None, made)

torch.set_num_threads(2)
small, large, made = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
load(small, made)
peak, ended = 0, threading.Event()
def watch():
    global peak
    while not ended.is_set():
        peak = max(peak, resident_bytes())
        time.sleep(0.0005)
before = resident_bytes()
Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts again
mark = highest()
watcher = threading.Thread(target=watch)
watcher.start()
weights = load(large, made)
ended.set()
watcher.join()
kept = resident_bytes()  # the watcher may have slept since the last tensors came
print(max(peak, kept) - before, kept - before, highest() - mark)
"""


def write_model(folder, layers, hidden, ffn, vocab):
    """A Llama of random weights. Returns its bytes."""
    folder.mkdir()
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    tensors = {"model.norm.weight": torch.ones(hidden)}
    for index in range(layers):
        base = f"model.layers.{index}."
        for name in ("q", "k", "v", "o"):
            shapes[f"{base}self_attn.{name}_proj"] = (hidden, hidden)
        for name, shape in (
            ("gate", (ffn, hidden)),
            ("up", (ffn, hidden)),
            ("down", (hidden, ffn)),
        ):
            shapes[f"{base}mlp.{name}_proj"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{base}{name}.weight"] = torch.ones(hidden)
    tensors |= {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": 4,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def measured(own_process, tmp_path, made):
    """(stored bytes, own pages at the peak, own pages after, highest mark of all pages)"""
    write_model(tmp_path / "small", 2, 128, 256, 512)
    size = write_model(tmp_path / "large", 24, 384, 1024, 4096)
    reported = own_process(PROGRAM, tmp_path / "small", tmp_path / "large", made)
    return size, *map(int, reported.split())


linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's counters"
)


@pytest.mark.nightly
@linux
def test_loading_peaks_at_a_tenth_more_than_the_model(
    own_process: Callable[..., str], tmp_path: Path
) -> None:
    size, peak, _, mark = measured(own_process, tmp_path, "none")
    assert size > 90e6
    assert 0.97 * size < peak < 1.1 * size
    assert mark < 1.1 * size  # mapped pages of the file too: they are given back as it is read


@linux
@pytest.mark.nightly
def test_quantising_makes_no_plain_copy_of_the_model(
    own_process: Callable[..., str], tmp_path: Path
) -> None:
    size, peak, after, mark = measured(own_process, tmp_path, "int4")
    assert after < 0.45 * size  # embedding and head, 7 % of the model, stay as they are
    assert peak < 1.2 * after
    assert mark < 0.55 * size
