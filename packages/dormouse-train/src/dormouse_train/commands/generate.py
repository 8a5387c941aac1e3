"""`dormouse generate`: a prompt and what the model writes after it."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from dormouse_train.commands import trained
from dormouse_train.console import shown
from dormouse_train.errors import UserError
from dormouse_train.waiting import waiting

LONG_PROMPT = 4096
"""Bytes of a prompt from which on reading it is announced."""


def command(
    run: Path,
    prompt: bytes,
    length: int,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: Sequence[bytes] = (),
    seed: int,
) -> int:
    """Stream the text to stdout, byte by byte as it is drawn: the bytes themselves, on a terminal what it may show."""
    _, model = trained.load(run)
    from dormouse_model import generate

    write = _shown() if sys.stdout.isatty() else _raw
    try:
        written = generate(
            model, prompt, length, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, seed=seed
        )
        write(prompt)
        if len(prompt) < LONG_PROMPT or not length:
            first = []
        else:
            with waiting("reading the prompt", len(prompt), counted=False):
                first = [next(written)]  # the prompt is read when a byte is asked for
        for piece in chain(first, written):
            write(piece)
    except ValueError as error:
        raise UserError(str(error)) from None
    write(None)
    return 0


def _raw(piece: bytes | None) -> None:
    if piece is not None:
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()


def _shown() -> Callable[[bytes | None], None]:
    """What is not printable UTF-8 appears as escapes; the end is a newline."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(piece: bytes | None) -> None:
        text = decoder.decode(piece or b"", final=piece is None)
        print(shown(text.encode()), end="" if piece is not None else "\n", flush=True)

    return write
