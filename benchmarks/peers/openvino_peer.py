"""OpenVINO GenAI's ContinuousBatchingPipeline as a peer, run by its own Python.

Weights are exported once by optimum-intel, not compressed, into a folder beside the model's;
all else is the pipeline's default, which the facts state. One step is one `step()` of the
pipeline: its scheduler, the model, its sampler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from openvino._offline_transformations import paged_attention_transformation

from benchmarks.peers.request_loop import options, serve

MAX_TOKENS = 4096  # more than any sequence draws
DEVICE = "CPU"


class OpenVino:
    def __init__(self, model: Path, threads: int, kv_gib: int, step_tokens: int) -> None:
        self._folder = exported(model)
        self._properties = {"INFERENCE_NUM_THREADS": threads}
        self._facts = self._ask_precision()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = step_tokens
        scheduler.cache_size = kv_gib
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._folder, scheduler, DEVICE, self._properties
        )
        self._held: dict[str, openvino_genai.GenerationHandle] = {}
        self._number = 0

    def facts(self) -> dict[str, str]:
        return self._facts

    def add(self, prompt: list[int]) -> str:
        greedy = openvino_genai.GenerationConfig()
        greedy.max_new_tokens, greedy.ignore_eos, greedy.do_sample = MAX_TOKENS, True, False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._number += 1
        handle = self._pipeline.add_request(self._number, ids, greedy)
        self._held[str(self._number)] = handle
        return str(self._number)

    def step(self) -> dict[str, int]:
        self._pipeline.step()
        drawn = {}
        for name, handle in self._held.items():
            if handle.can_read():
                ((_, output),) = handle.read().items()
                drawn[name] = int(output.generated_ids[-1])
        return drawn

    def drop(self) -> None:
        for handle in self._held.values():
            handle.cancel()
        self._held.clear()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _ask_precision(self) -> dict[str, str]:
        """Return the precisions of the model, compiled here with the pipeline's file and
        properties.

        The pipeline does not hand out its compiled model.
        """
        core = openvino.Core()
        model = core.read_model(self._folder / "openvino_model.xml")
        weights = {
            node.get_element_type().get_type_name()
            for node in model.get_ops()
            if node.get_type_name() == "Constant" and len(node.shape) == 2 and min(node.shape) > 1
        }
        paged_attention_transformation(model)
        compiled = core.compile_model(model, DEVICE, self._properties)
        caches = {
            each.get_element_type().get_type_name()
            for each in compiled.inputs
            if "_cache." in each.get_any_name()
        }
        return {
            "openvino-genai": version("openvino-genai"),
            "openvino": version("openvino"),
            "weights": " ".join(sorted(weights)),
            "products": compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name(),
            "kv": " ".join(sorted(caches)),
            "kv_hint": compiled.get_property("KV_CACHE_PRECISION").get_type_name(),
            "mode": compiled.get_property("EXECUTION_MODE_HINT").name.lower(),
            "threads": str(compiled.get_property("INFERENCE_NUM_THREADS")),
        }


def exported(model: Path) -> Path:
    """The folder of OpenVINO's form of the model, made at the first need."""
    folder = model.with_name(f"{model.name}-openvino-{version('openvino')}")
    if (folder / "openvino_model.xml").is_file():
        return folder
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=model.parent))
    tool = Path(sys.executable).with_name("optimum-cli")
    command: list[str | Path] = [tool, "export", "openvino", "--task", "text-generation-with-past"]
    try:
        subprocess.run([*command, "--model", model, draft], check=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # nothing left of it after the rename
    return folder


def main() -> None:
    given = options()
    serve(lambda: OpenVino(Path(given.model), given.threads, given.kv_gib, given.step_tokens))


if __name__ == "__main__":
    main()
