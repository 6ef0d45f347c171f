"""Text, records and ids → rows of a given length in a token store, with a ledger of where every token went."""

from megaspan.data.ledger import TokenLedger as TokenLedger
from megaspan.data.prepare import prepare_rows as prepare_rows
from megaspan.data.rows import Row as Row
from megaspan.data.rows import Rows as Rows
from megaspan.data.rows import join as join
from megaspan.data.show import data_command as data_command
from megaspan.data.show import show_row as show_row

__all__ = ["Row", "Rows", "TokenLedger", "data_command", "join", "prepare_rows", "show_row"]
