"""One bit of one KV block flips on its way: unverified it changes what the model says, verified
it is caught, read again, and the answer is right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from tokenizers import Tokenizer

from baton.kv_transfer.memory_mover import Fate
from baton.models.corpus import mix
from baton.models.embedded import embedded_model
from baton.models.training.tiny_tokenizer import END, ChatEncoder
from baton.runtime import metrics
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.model_cluster import ModelCluster
from tests.support.machine_speed import slowness

BLOCK = 16
HEAD_DIM = 32
FIRST = 4  # value of a head whose bit is flipped: earlier ones change no word of the shipped model
TRIES = 24  # of about two seconds each
SECOND_EXPONENT_BIT = 13  # of a bfloat16: where the first is set, a number becomes enormous


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))


@pytest.fixture(scope="module")
def question(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """A conversation that ends by asking for a code word given at its start; the code word."""
    encoder = ChatEncoder(tokenizer)
    talk = mix.recall(5, held_out=True, distance=200, measure=encoder.measure)
    chat = encoder.encode(talk)
    *_, (_, start, _) = chat.answers
    return list(chat.ids[:start]), str(talk.messages[-1]["content"])


Cluster = Callable[..., ModelCluster]


@pytest.fixture
async def make() -> AsyncIterator[Cluster]:
    made: list[ModelCluster] = []

    def cluster(*, verify: bool, bit: int | None = None) -> ModelCluster:
        """Bit `bit` of the first block of the first READ flips, if one is given."""
        found = ModelCluster(embedded_model(), block_size=BLOCK, verify=verify)
        found.add_prefill("prefill-0", 40)
        found.add_decode("decode-0", 40)
        fates = [] if bit is None else [Fate(corrupt=0, bit=bit)]
        found.exchange.decide = lambda attempt: fates.pop() if fates else Fate()
        made.append(found)
        return found

    yield cluster
    for each in made:
        await each.close()


async def answer(cluster: ModelCluster, tokenizer: Tokenizer, prompt: list[int]) -> str:
    """What it says to the end, or until its numbers are no longer finite."""
    client = Client(cluster, "decode-0")
    request = client.submit(prompt, max_tokens=24, stop=(tokenizer.token_to_id(END),))
    await request.finished(60 * slowness())
    said: str = tokenizer.decode(request.tokens())
    return said


async def test_one_flipped_bit_changes_the_answer_unless_verified(
    make: Cluster, tokenizer: Tokenizer, question: tuple[list[int], str]
) -> None:
    prompt, right = question
    assert await answer(make(verify=False), tokenizer, prompt) == right
    values = 3 * 2 * BLOCK * HEAD_DIM + BLOCK * HEAD_DIM  # of the first head, in layer 3
    for number in range(values + FIRST, values + FIRST + TRIES):
        bit = 16 * number + SECOND_EXPONENT_BIT
        if await answer(make(verify=False, bit=bit), tokenizer, prompt) != right:
            break
    else:
        raise AssertionError("no flipped bit changed the answer")
    caught = metrics.REGISTRY.get_sample_value("baton_checksum_failures_total") or 0
    assert await answer(make(verify=True, bit=bit), tokenizer, prompt) == right
    assert metrics.REGISTRY.get_sample_value("baton_checksum_failures_total") == caught + 1
