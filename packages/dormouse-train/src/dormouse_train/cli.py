"""The commands `train` and `dormouse`: options, and errors as one sentence.

Nothing heavy is imported to print help: a command's own module is imported when it runs.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dormouse_train.errors import UserError
from dormouse_train.signals import leave_on_signals

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Run = Annotated[Path, typer.Argument(help="The folder of a run.")]


def train(
    config: Annotated[
        str | None, typer.Option("--config", metavar="NAME|FILE", help="A named configuration or a TOML file.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="A file, folder or glob of raw bytes or .gz; may be repeated."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Steps to train for.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The run's folder; a new one under runs/ by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run, or with the newest under runs/.")
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of weights and of data order.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="CUDA where there is a device by default.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as train.lr=0.01; may be repeated."),
    ] = None,
) -> int:
    """Train a byte-level language model: on Python's own standard library, or on the bytes of --data."""
    from dormouse_train.commands.train import command

    options = {"train.steps": steps, "train.seed": seed, "train.device": device, "data.paths": data or None}
    overrides = {key: value for key, value in options.items() if value is not None}
    return command(config, run, resume=resume, sets=sets or [], overrides=overrides)


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the model goes on from.")] = "",
    length: Annotated[int, typer.Option("--bytes", metavar="N", min=0, help="Bytes to write.")] = 500,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", min=0.0, help="0 takes the most probable byte each time.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the draws.")] = 0,
) -> int:
    """Write on from a prompt with the newest checkpoint of a run."""
    from dormouse_train.commands.generate import command

    return command(run, os.fsencode(prompt), length, temperature=temperature, seed=seed)


def evaluate(
    run: Run,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="Score these bytes, not the run's held-out ones; may be repeated."),
    ] = None,
) -> int:
    """Score the newest checkpoint of a run in bits per byte."""
    from dormouse_train.commands.evaluate import command

    return command(run, data or [])


def info(run: Run) -> int:
    """Show what a run is, how far it came, and whether its checkpoints are whole."""
    from dormouse_train.commands.info import command

    return command(run)


def main() -> NoReturn:
    """The console script `dormouse`."""
    app = _app(no_args_is_help=True)
    app.command("train")(train)
    app.command("generate")(generate)
    app.command("eval")(evaluate)
    app.command("info")(info)

    @app.callback()
    def root() -> None:
        """Train byte-level language models with many tiny experts, and use them."""

    _run(app)


def train_main() -> NoReturn:
    """The console script `train`, the same as `dormouse train`."""
    app = _app()
    app.command()(train)
    _run(app)


def _app(*, no_args_is_help: bool = False) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        no_args_is_help=no_args_is_help,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing rich's formatter takes longer than all the rest of printing help
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _run(app: typer.Typer) -> NoReturn:
    """Run a command and leave with its exit code; what a user can mend is one sentence on stderr and 2."""
    leave_on_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 shows an escape, not a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
    except BrokenPipeError:  # the reader of stdout left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + 13
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        code = UserError.exit_code
    sys.exit(code)


def _sentence(error: Exception) -> str | None:
    """What a user reads of `error`; None where it is a fault of the program, whose traceback is needed."""
    if isinstance(error, UserError):
        return str(error)
    usage = getattr(
        error, "format_message", None
    )  # only typer's own errors have it; their base class has no public name
    if usage is not None:
        return f"{usage().rstrip('.')}; --help lists the options"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        mend = "free space or lift the limit; --resume goes on from the last checkpoint" if error.errno in FULL else ""
        return f"{where}{error.strerror[0].lower()}{error.strerror[1:]}; {mend or 'mend that and try again'}"
    from dormouse_model.config import ConfigError

    return str(error) if isinstance(error, ConfigError) else None
