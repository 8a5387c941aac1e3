"""Errors that are the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """One sentence that names what is wrong, what was got and the mend; the command line prints it and exits with 2."""

    exit_code = 2
