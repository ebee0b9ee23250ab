"""The main module of a rank process: loads a share of the model, then runs the leader's commands.

    leader ── options ──▶ load ── "loaded" ──▶ leader ── pool ──▶ serve: bell, arrays, compute, ...

It knows no scheduler, no sequences and no sampling. It ends on the leader's command, when the
leader has ended, or when another rank does not take part in a sum.
"""

from __future__ import annotations

import json
import socket
import sys

import torch

from baton.engine.ranks.layout_arrays import from_arrays
from baton.engine.ranks.logits_board import LogitsBoard
from baton.engine.ranks.rank_decoder import RankDecoder
from baton.engine.ranks.rank_link import end_with_leader, receive, refuse
from baton.engine.ranks.rank_message import BELL, Command, read_arrays, slot_of
from baton.engine.ranks.rank_parts import RankParts, load_rank
from baton.runtime.errors import BatonError


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    end_with_leader()
    link = socket.socket(fileno=int(sys.argv[1]))
    options, memories = receive(link)
    try:
        loaded = load_rank(options)
    except BatonError as error:
        refuse(link, error)
    link.send(json.dumps({"loaded": options.rank}).encode())
    options, pool_memory = receive(link)
    try:
        parts = loaded.with_pool(options, [*memories, *pool_memory])
    except BatonError as error:
        refuse(link, error)
    link.send(json.dumps({"ready": options.rank}).encode())
    follow(link, parts)


@torch.inference_mode()
def follow(link: socket.socket, parts: RankParts) -> None:
    """Carry out commands until the leader closes the socket or ends."""
    hidden = {Command.HIDDEN: parts.decoder}
    logits = {Command.LOGITS: parts.decoder}
    if parts.draft is not None:
        hidden[Command.DRAFT_HIDDEN] = logits[Command.DRAFT_LOGITS] = parts.draft
    while bell := link.recv(BELL.size):
        command, slot, size = BELL.unpack(bell)
        arrays = read_arrays(slot_of(parts.commands, slot)[:size])
        if command in hidden:
            hidden[command].hidden(from_arrays(arrays))
        elif command == Command.HIDDEN_SHORTENED:
            parts.decoder.shortened(int(arrays[0][0])).hidden(from_arrays(arrays[1:]))
        else:
            rows = torch.from_numpy(arrays[0])
            put_logits(logits[command], parts.board, rows, parts.dtype)


def put_logits(
    decoder: RankDecoder, board: LogitsBoard, rows: torch.Tensor, dtype: torch.dtype
) -> None:
    """Publish the rank's logits of hidden states, which arrive in a dtype of numpy."""
    board.put(decoder.logits(rows.view(dtype)), decoder.tokens)


if __name__ == "__main__":
    main()
