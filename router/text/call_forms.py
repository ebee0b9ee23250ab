"""The forms in which known models write calls of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping

from baton.router.text.call_form import NAME, CallForm
from baton.router.text.json_call import JsonForm
from baton.router.text.markup_call import MarkupForm
from baton.router.text.named_call import NamedForm, WrittenCall

_SPACE = r"[ \t\r\n]*"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"

_DEEPSEEK_V3 = NamedForm(
    openings=(_CALLS, _CALL),
    header=re.compile(
        rf"{_SPACE}(?:{_CALL})?{_SPACE}function{_SEP}({NAME}){_SPACE}```json{_SPACE}"
    ),
    closings=("```", _CALL_END),
    epilogue=_CALLS_END,
    markers=(_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END),
    written=WrittenCall(
        f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_CALL_END}", _CALLS, "\n", _CALLS_END
    ),
)
_DEEPSEEK_V31 = NamedForm(
    openings=(_CALLS, _CALL),
    header=re.compile(rf"{_SPACE}(?:{_CALL})?{_SPACE}({NAME}){_SEP}{_SPACE}"),
    closings=(_CALL_END,),
    epilogue=_CALLS_END,
    markers=(_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END),
    written=WrittenCall(_CALL, _SEP, _CALL_END, _CALLS, "", _CALLS_END),
)
# The recipient stands in the channel or before it, with or without the type of what follows.
_HARMONY = NamedForm(
    openings=(
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis to=functions.",
        "<|start|>assistant to=functions.",
        "to=functions.",
    ),
    header=re.compile(
        rf"({NAME})(?: ?{_CHANNEL})?(?: ?(?:<\|constrain\|>)?json)?{_SPACE}<\|message\|>{_SPACE}"
    ),
    epilogue="<|call|>",
    markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    written=WrittenCall(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        answer="<|channel|>final<|message|>",
    ),
)
_QWEN_CODER = MarkupForm(
    openings=("<tool_call>", "<function="),
    name="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    end="</function>",
    closing="</tool_call>",
    epilogue="</tool_call>",
    padded=True,
    markers=("<tool_call>", "</tool_call>"),
)
_GLM = MarkupForm(
    openings=("<tool_call>",),
    name="",
    name_end="",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
    closing="",
    padded=False,
    markers=(
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
)

# The most distinctive form first, bare objects last.
FORMS: Mapping[str, CallForm] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "gpt_oss": _HARMONY,
    "qwen3_coder": _QWEN_CODER,
    "glm": _GLM,
    "mistral": JsonForm("[TOOL_CALLS]", listed=True),
    "hermes": JsonForm("<tool_call>", "</tool_call>"),
    "llama": JsonForm("<|python_tag|>", bare=True),
}
