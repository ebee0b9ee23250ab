"""The router's knowledge of a model, from its folder: names, limits, end tokens, chat template.

Read once at start from config.json, generation_config.json, tokenizer_config.json and
chat_template.jinja. Knows no weights. The template is taken from this folder only, never from
a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from baton.runtime.end_tokens import end_tokens
from baton.runtime.errors import ModelError

_TEXT_SIZES = {"gemma3_text": {"max_position_embeddings": 131_072, "vocab_size": 262_208}}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """`max_context` counts tokens of prompt and output together. `template` is None where the
    model has no chat template; `tool_template` is the one for chats with tools if that differs;
    `special` are the named tokens that templates may print."""

    name: str
    max_context: int
    vocab_size: int
    end_tokens: frozenset[int]
    template: str | None
    tool_template: str | None
    special: dict[str, str]
    tokenizer_file: Path
    generation_config: dict[str, Any]  # generation_config.json as it is


def read_card(folder: Path, name: str) -> ModelCard:
    """Read the model's files. Raises ModelError, which names the file, the fault and the remedy."""
    config = _json(folder / "config.json", required=True)
    generation_config = _json(folder / "generation_config.json")
    tokenizer = _json(folder / "tokenizer_config.json")
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ModelError(
            f"{tokenizer_file} is missing: give a model folder with a fast tokenizer "
            "(save it with transformers' `save_pretrained`)"
        )
    sizes = _sizes(config)
    templates = _templates(folder, tokenizer)
    return ModelCard(
        name=name,
        max_context=_count(sizes, "max_position_embeddings", folder),
        vocab_size=_count(sizes, "vocab_size", folder),
        end_tokens=frozenset(end_tokens(folder, config, generation_config)),
        template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        special=_special(tokenizer),
        tokenizer_file=tokenizer_file,
        generation_config=generation_config,
    )


def tokenizer_info(card: ModelCard) -> dict[str, Any]:
    """Return what clients that tokenize by the router need: special tokens, chat template."""
    info: dict[str, Any] = {**card.special, "model_max_length": card.max_context}
    if card.template is not None:
        info["chat_template"] = card.template
    return info


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the text part if the model also reads images; its file may lack what its
    class in transformers fixes."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    return _TEXT_SIZES.get(str(text.get("model_type")), {}) | text


def _json(path: Path, required: bool = False) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError as error:
        if required:
            raise ModelError(
                f"{path} is missing: give the folder of a model in Hugging Face format"
            ) from error
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download the model again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object: download the model again")
    return found


def _count(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder / 'config.json'}: {key} is {value!r}, expected a count")
    return value


def _templates(folder: Path, tokenizer: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name; an unnamed one is "default". chat_template.jinja wins over
    tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    found = tokenizer.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        named = {entry.get("name"): entry.get("template") for entry in found}
        if all(isinstance(text, str) for both in named.items() for text in both):
            return named
    raise ModelError(
        f"{folder / 'tokenizer_config.json'}: chat_template is neither a string "
        "nor a list of named templates"
    )


def _special(tokenizer: dict[str, Any]) -> dict[str, str]:
    special = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = tokenizer.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            special[key] = value
    return special
