"""Errors that are the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """One sentence that names what is wrong, what was got and the mend; the command line prints it and exits with 2."""

    exit_code = 2


def missing_extra(what: str, module: str, extra: str) -> UserError:
    """The error for `what`, which needs a `module` that an optional extra of this package installs."""
    return UserError(f"{what} and {module} is not installed; add it with: uv add 'dormouse-train[{extra}]'")


def out_of_memory(error: BaseException) -> str | None:
    """The first line of `error` where it says that memory, of a device or of the machine, did not suffice.

    Told by what it says: a CPU's allocator raises a plain `RuntimeError`, and its words differ between systems.
    """
    if isinstance(error, MemoryError):
        return f"out of memory ({error})" if str(error) else "out of memory"
    text = str(error)
    lowered = text.lower()
    said = any(words in lowered for words in ("out of memory", "not enough memory", "can't allocate memory"))
    return text.splitlines()[0].rstrip(".") if isinstance(error, RuntimeError) and said else None


__all__ = [
    "UserError",
]
