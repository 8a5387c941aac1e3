"""Where the row of an operand that belongs to sorted row i lies."""

SORTED = 0
"""At i."""
TOKEN = 1
"""At its token, order[i] // k."""
SLOT = 2
"""At its slot, order[i]."""
