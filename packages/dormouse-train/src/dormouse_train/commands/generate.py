"""`dormouse generate`: a prompt and what the model writes after it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from dormouse_train.commands import trained
from dormouse_train.console import shown
from dormouse_train.errors import UserError


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
    """Stream the text to stdout, byte by byte as it is drawn; what is not printable UTF-8 appears as escapes."""
    _, model = trained.load(run)
    from dormouse_model import generate

    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    try:
        written = generate(
            model, prompt, length, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, seed=seed
        )
        for piece in chain([prompt], written):
            print(shown(decoder.decode(piece).encode()), end="", flush=True)
    except ValueError as error:
        raise UserError(str(error)) from None
    print(decoder.decode(b"", final=True), flush=True)
    return 0
