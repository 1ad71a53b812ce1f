"""Tables on the terminal: by rich where it is installed, else in plain columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_LOG_WIDTH = 120


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print one table; numbers are set to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    print(title)
    if not _print_rich(columns, cells, numeric):
        _print_plain(columns, cells, numeric)
    sys.stdout.flush()


def _print_rich(columns: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table()
    for column, is_number in zip(columns, numeric, strict=True):
        table.add_column(column, justify="right" if is_number else "left")
    for row in cells:
        table.add_row(*row)
    # Behind mpiexec or in a log there is no terminal to ask, and rich would cut the columns to 80.
    Console(width=None if sys.stdout.isatty() else _LOG_WIDTH).print(table)
    return True


def _print_plain(columns: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> None:
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        padded = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, numeric, strict=True)
        ]
        print("  " + "  ".join(padded).rstrip())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)
