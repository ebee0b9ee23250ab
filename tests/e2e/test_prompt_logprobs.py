"""Log-probabilities of prompts through real processes, disaggregated and local, held against
transformers."""

from __future__ import annotations

import math

import openai
import pytest
import torch
import transformers

from baton.models.embedded import embedded_model
from tests.support.json_values import Json, JsonObject

MESSAGE = "a long walk along the river and over the hill " * 12


@pytest.mark.parametrize("fleet", [pytest.param("pair", marks=pytest.mark.nightly), "alone"])
def test_echo_scores_a_prompt_as_transformers_does(
    fleet: str, request: pytest.FixtureRequest
) -> None:
    cluster = request.getfixturevalue(fleet)
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        fields: JsonObject = {"prompt_logprobs": 1, "return_token_ids": True}
        for _ in range(2):  # the second time its blocks are cached
            answer = client.completions.create(
                model="small",
                prompt=MESSAGE,
                max_tokens=0,
                echo=True,
                logprobs=1,
                extra_body=fields,
            )
            (choice,) = answer.choices
            assert choice.text == MESSAGE and choice.logprobs is not None
            extra: Json = choice.model_extra
            tokens, found = extra["prompt_token_ids"], choice.logprobs.token_logprobs
            assert found is not None and found[0] is None
            model = transformers.AutoModelForCausalLM.from_pretrained(
                embedded_model(), dtype=torch.float32
            )
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0, :-1]
            wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            assert len(found) == len(tokens) > 100
            for ours, theirs in zip(found[1:], wanted.tolist(), strict=True):
                assert ours is not None and math.isclose(ours, theirs, abs_tol=2e-3)
            ids = [
                entry[str(token)]["logprob"]
                for entry, token in zip(extra["prompt_logprobs"][1:], tokens[1:], strict=True)
            ]
            assert ids == found[1:]
