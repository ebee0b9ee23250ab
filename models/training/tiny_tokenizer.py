"""The trained model's tokenizer, its chat template, and conversations as token ids.

Byte-level BPE in which every digit is a token of its own; what is in chat messages is encoded
message by message, as the special tokens between them divide the text. Knows no weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.models.corpus.conversation import Conversation, Message
from baton.models.corpus.mix import STAGE_ONE, conversation
from baton.models.corpus.sentences import sentences

ENTRIES = 4096
PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, END, *(f"<|{role}|>" for role in ROLES))
CALL, CALL_END = "<tool_call>", "</tool_call>"  # seen in the text, so not special
_CONVERSATIONS = 3_000
_SENTENCES = 12_000  # of a wider vocabulary, so that other plain English is not cut to pieces

CHAT_TEMPLATE = """\
{%- if tools -%}
<|system|>Tools:
{%- for tool in tools -%}
{%- set given = tool.function if tool.function is defined else tool -%}
{{- ' ' + given.name + '(' -}}
{%- if given.parameters is defined and given.parameters.properties is defined -%}
{%- for name in given.parameters.properties -%}
{{- name if loop.first else ', ' + name -}}
{%- endfor -%}
{%- endif -%}
{{- ')' -}}
{%- if given.description is defined -%}{{- ': ' + given.description -}}{%- endif -%}
{{- '.' -}}
{%- endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role: use system, user, assistant or tool') -}}
{%- endif -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- elif message.content -%}
{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set given = call.function -%}
{{- '<tool_call>{"name": ' + given.name | tojson + ', "arguments": ' -}}
{{- given.arguments if given.arguments is string else given.arguments | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train() -> Tokenizer:
    """A new tokenizer of ENTRIES entries or a little fewer, the special tokens first. The same
    version of `tokenizers` gives the same one on every machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES - 2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, CALL_END)])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json and tokenizer_config.json; `context` is in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _texts() -> Iterator[str]:
    for seed in range(_CONVERSATIONS):
        talk = conversation(seed, held_out=False, tokens=12, measure=len, tasks=STAGE_ONE)
        for text in texts(talk):
            yield text[text.index("|>") + 2 :]
    yield from sentences(_SENTENCES, seed=random.Random(0).randrange(1 << 30))


def texts(talk: Conversation) -> list[str]:
    """Render each message by the template, the tools' text before them. Without the end
    tokens; the special token of the role leads."""
    turns_before = [f"<|system|>Tools: {' '.join(map(_tool, talk.tools))}"] if talk.tools else []
    return turns_before + [_text(message) for message in talk.messages]


def _tool(tool: Message) -> str:
    given = tool["function"]
    names = ", ".join(given["parameters"]["properties"])
    return f"{given['name']}({names}): {given['description']}."


def _text(message: Message) -> str:
    parts = [f"<|{message['role']}|>", message["content"] or ""]
    for item in message.get("tool_calls", ()):
        parts.append(f"{CALL}{json.dumps(item['function'], ensure_ascii=False)}{CALL_END}")
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a conversation, and where the assistant's answers are: `answers` holds the
    task, the place of an answer's first token, and the place after its end token."""

    ids: tuple[int, ...]
    answers: tuple[tuple[str, int, int], ...]


class ChatEncoder:
    """Conversations as token ids, equal to what the template and the tokenizer give."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = SPECIAL_TOKENS.index(END)  # special tokens come first

    def measure(self, messages: Sequence[Message]) -> int:
        """Tokens that these messages take in a conversation."""
        found = self._tokenizer.encode_batch_fast([_text(message) for message in messages])
        return sum(len(each) + 1 for each in found)

    def encode(self, talk: Conversation) -> Encoded:
        said = texts(talk)
        tasks = ["tools"] * (len(said) - len(talk.tasks)) + list(talk.tasks)
        ids: list[int] = []
        answers = []
        for text, task, found in zip(
            said, tasks, self._tokenizer.encode_batch_fast(said), strict=True
        ):
            start = len(ids) + 1
            ids += found.ids
            ids.append(self._end)
            if text.startswith("<|assistant|>"):
                answers.append((task, start, len(ids)))
        return Encoded(tuple(ids), tuple(answers))
