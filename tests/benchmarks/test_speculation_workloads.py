"""The workloads of the speculation benchmark: drawn from a seed, in the model's wordings."""

from __future__ import annotations

from benchmarks.inputs.speculation_workloads import chat_text, chats, edits


def test_chats_are_drawn_from_the_seed_and_await_an_answer() -> None:
    found = chats(7, 12)
    assert found == chats(7, 12) != chats(8, 12)
    assert all(prompt.messages[-1]["role"] in ("user", "tool") for prompt in found)
    assert all(prompt.text.endswith("<|end|><|assistant|>") for prompt in found)


def test_a_revision_changes_one_item_of_the_text_before() -> None:
    found = edits(3, users=4, revisions=5)
    assert found == edits(3, users=4, revisions=5)
    assert len(found) == 20 and len({prompt.tenant for prompt in found}) == 4
    for before, after in zip(found, found[1:], strict=False):
        if before.tenant != after.tenant:
            continue
        old, new = (
            prompt.messages[0]["content"].partition(": ")[2].split(", ")
            for prompt in (before, after)
        )
        assert sum(one != other for one, other in zip(old, new, strict=True)) == 1


def test_a_text_is_put_as_the_template_does() -> None:
    messages = ({"role": "user", "content": "Hello"},)
    assert chat_text(messages) == "<|user|>Hello<|end|><|assistant|>"
