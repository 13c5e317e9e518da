"""Tables that narrow terminals can show."""

from typing import Any

from rich.table import Column, Table


def table_of(*columns: str, **options: Any) -> Table:
    """A `rich.table.Table` with these columns, whose cells are folded in a narrow terminal.

    Rich would end a cell that is too long with an ellipsis, which the encoding of the terminal may not have.
    """
    return Table(*(Column(name, overflow="fold") for name in columns), **options)
