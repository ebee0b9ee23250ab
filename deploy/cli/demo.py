"""`baton demo`: serve the embedded model disaggregated, and show the first tokens.

What `make demo` runs. One chat goes the whole way by itself: prefilled on one worker, its KV
read by another, streamed to this terminal. Then it serves until Ctrl-C, or ends with `once`.
"""

from __future__ import annotations

import time

from baton.deploy.cli.chat import ChatClient, printable
from baton.deploy.serve.plan import ServeOptions
from baton.deploy.serve.serve import serve
from baton.runtime.errors import BatonError

QUESTION = "Tell me a happy story about the fox Rosa, a red kite and the garden."
ANSWER_TOKENS = 48


def demo(options: ServeOptions, *, once: bool) -> None:
    """Serve, ask one question, print the answer as it comes; raises BatonError if none does."""

    def ask(url: str, model: str) -> bool:
        print(f"\nyou    {QUESTION}\n{model}  ", end="", flush=True)
        began = time.monotonic()
        first_s = None
        stream = ChatClient(url).stream(
            model, [{"role": "user", "content": QUESTION}], max_tokens=ANSWER_TOKENS, seed=1
        )
        for piece in stream:
            first_s = first_s or time.monotonic() - began
            print(printable(piece), end="", flush=True)
        if first_s is None:
            raise BatonError("the demonstration's answer is empty")
        took = time.monotonic() - began
        print(f"\n\nFirst token after {first_s:.2f} s, the whole answer after {took:.2f} s.")
        return not once

    serve(options, after_ready=ask)
