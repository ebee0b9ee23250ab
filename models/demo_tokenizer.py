"""The demonstration tokenizer: byte-level BPE trained on `models/corpus.py`, and its template.

Written in the Hugging Face folder format (tokenizer.json, tokenizer_config.json). The same
version of `tokenizers` gives the same file on every machine. Knows no weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.models.corpus import sentences

TOKENIZER_ENTRIES = 2048
PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
_SENTENCES = 12_000
_WORD = re.compile(r"Ġ[A-Za-z]{2,}|[.,;:!?]")  # Ġ stands for a space in byte-level BPE

CHAT_TEMPLATE = """\
{%- if tools %}<|system|>Tools: {{ tools | tojson }}<|end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role: use system, user, assistant or tool') -}}
{%- endif -%}
<|{{ message.role }}|>
{%- if message.content is string -%}
{{ message.content }}
{%- elif message.content -%}
{%- for part in message.content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}{{ call.function | tojson }}{%- endfor -%}
<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def train() -> Tokenizer:
    """A new tokenizer of TOKENIZER_ENTRIES entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_ENTRIES,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(_SENTENCES), trainer)
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


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """The entries that are whole words or punctuation: what a random model may well say."""
    return sorted(i for entry, i in tokenizer.get_vocab().items() if _WORD.fullmatch(entry))
