"""Prints a table at a terminal's width, and into a pipe or a file with each row on one line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

PIPE_COLUMNS = 160


def print_table(table: Table) -> None:
    """Print at the width of the terminal, else of COLUMNS, else of PIPE_COLUMNS."""
    from rich.console import Console  # most commands print no table

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=PIPE_COLUMNS)
    console.print(table)
