"""The options of `train` and `dormouse`.

A command's own module is imported when it runs, so that printing help imports nothing heavy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(help="The folder of a run.")]


def train(
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="NAME|FILE",
            help="nano, small, medium, b1, or a TOML file; by default nano on a CPU, small on CUDA.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="A file, folder or glob, or markov:ORDER:SEED; may be repeated."),
    ] = None,
    val: Annotated[
        list[str] | None,
        typer.Option("--val", metavar="PATH", help="Bytes to hold out, not a share of --data; may be repeated."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Steps to train for.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The run's folder; a new one under runs/ by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run, or with the newest under runs/.")
    ] = False,
    init: Annotated[
        str | None, typer.Option("--init", metavar="RUN|FILE", help="Begin with the weights of a run or an export.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of weights and of data order.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="CUDA where there is a device by default.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change one key, such as train.lr=0.01; may be repeated. docs/train.md says what each does.",
        ),
    ] = None,
) -> int:
    """Train a byte-level language model. Without --data it reads Python's own standard library."""
    from dormouse_train.signals import AS_IT_WAS, NOTHING_KEPT, before_leaving, tell

    with before_leaving(lambda: tell(AS_IT_WAS if resume else NOTHING_KEPT)):
        from dormouse_train.commands.train import command

    options: dict[str, object] = {"train.steps": steps, "train.init": init, "train.seed": seed}
    options |= {"train.device": device, "data.paths": data or None, "data.val": val or None}
    overrides = {key: value for key, value in options.items() if value is not None}
    return command(config, run, resume=resume, sets=sets or [], overrides=overrides)


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the model goes on from.")] = "",
    length: Annotated[int, typer.Option("--bytes", metavar="N", min=0, help="Bytes to write.")] = 500,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", min=0.0, help="0 takes the most probable byte each time.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", min=1, help="Draw from the N most probable bytes alone.")
    ] = None,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="X", help="Draw from the fewest bytes that have this share together.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End after writing this; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the draws.")] = 0,
) -> int:
    """Write on from a prompt with the newest checkpoint of a run."""
    from dormouse_train.commands.generate import command

    stops = [os.fsencode(text) for text in stop or []]
    text = os.fsencode(prompt)
    return command(run, text, length, temperature=temperature, top_k=top_k, top_p=top_p, stop=stops, seed=seed)


def evaluate(
    run: Run,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="Score these bytes, not the run's held-out ones; may be repeated."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="BYTES", min=0, help="Most bytes to score, 1048576 by default; 0 is all."),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Score the bytes kept for a test, where the data has such, as enwik8 does.")
    ] = False,
) -> int:
    """Score the newest checkpoint of a run in bits per byte."""
    from dormouse_train.commands.evaluate import command

    return command(run, data or [], window, test=test)


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write, such as model.safetensors.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Of this checkpoint; the newest by default.")
    ] = None,
) -> int:
    """Write the weights of a run to one file. It is safetensors in bf16, with the configuration in it."""
    from dormouse_train.commands.export import command

    return command(run, out, step)


def info(
    run: Run,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw its curves to a picture as well.")
    ] = None,
) -> int:
    """Show what a run is and how far it came. Every checkpoint is read, to tell whether it is whole."""
    from dormouse_train.commands.info import command

    return command(run, plot)


def dormouse() -> typer.Typer:
    """The command `dormouse` with everything below it."""
    app = _empty(no_args_is_help=True)
    app.command("train")(train)
    app.command("generate")(generate)
    app.command("eval")(evaluate)
    app.command("export")(export)
    app.command("info")(info)

    @app.callback()
    def root() -> None:
        """Train byte-level language models with many tiny experts, and use them."""

    return app


def train_alone() -> typer.Typer:
    """The command `train`, the same as `dormouse train`."""
    app = _empty()
    app.command()(train)
    return app


def _empty(*, no_args_is_help: bool = False) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        no_args_is_help=no_args_is_help,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing rich's formatter takes longer than all the rest of printing help
        context_settings={"help_option_names": ["-h", "--help"]},
    )
