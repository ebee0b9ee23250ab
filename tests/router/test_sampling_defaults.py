"""What a model's own file says of drawing holds where the request says nothing."""

from __future__ import annotations

import orjson
import pytest

from baton.router.requests.openai_schema import CompletionRequest
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.sampling_defaults import OPENAI, SamplingDefaults, sampling_defaults
from baton.router.requests.validator import Validator
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject


def test_a_file_that_says_nothing_leaves_openais() -> None:
    assert sampling_defaults({"eos_token_id": 3, "temperature": None}) == OPENAI


def test_fields_are_taken_and_no_sampling_is_greedy() -> None:
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_defaults(said) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert sampling_defaults({**said, "do_sample": False}).temperature == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_k", 2.5),
        ("top_k", float("inf")),
        ("top_p", 0),
        ("top_p", "0.9"),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
    ],
)
def test_what_cannot_be_is_named_with_the_remedy(field: str, value: float | str) -> None:
    with pytest.raises(ModelError, match=f"{field} is .*router.model_sampling"):
        sampling_defaults({field: value})


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [({}, (0.5, 7)), ({"temperature": 0}, (0.0, 7)), ({"top_k": -1}, (0.5, 0))],
)
async def test_a_request_that_says_so_wins(asked: JsonObject, wanted: tuple[float, int]) -> None:
    class Tokens:
        vocab_size, longest_token_bytes = 256, 1

        async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

        async def exceeds(self, text: str, most_tokens: int) -> bool:
            return len(text) > most_tokens

    validator = Validator(
        "m",
        Tokens(),
        None,
        frozenset({7}),
        4,
        defaults=SamplingDefaults(temperature=0.5, top_k=7),
    )
    body = orjson.dumps({"model": "m", "prompt": "ab", **asked})
    made = await validator.completion(
        await validator.parsed(body, CompletionRequest), ContextLimits(100, 256)
    )
    assert (made.sampling.temperature, made.sampling.top_k) == wanted
