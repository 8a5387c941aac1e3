"""`bench`: measures this machine and prints tables; `--out` keeps the rows. Nothing heavy is imported to print help."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from dormouse_bench.rows import Row

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure dormouse and the machine it runs on.")


class Device(StrEnum):
    """Where to measure."""

    cpu = "cpu"
    cuda = "cuda"


DeviceOption = Annotated[Device | None, typer.Option(help="cpu or cuda; by default CUDA where there is one.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often each arm runs; the median counts.")]
OutOption = Annotated[Path | None, typer.Option(help="Results file to write, a JSON array of rows.")]


def main() -> None:
    """The console script."""
    app()


@app.command()
def experts(
    shape: Annotated[str, typer.Option(help="A named configuration; by default b1 on CUDA and nano elsewhere.")] = "",
    device: DeviceOption = None,
    rounds: RoundsOption = 10,
    out: OutOption = None,
) -> None:
    """Race the expert pass, reference against padded, forward and with backward, in one run."""
    import torch

    from dormouse_bench import experts as bench
    from dormouse_bench import tables
    from dormouse_bench.rows import origin

    where = _device(device)
    name = shape or ("b1" if where == "cuda" else "nano")
    known = bench.shapes()
    if name not in known:
        _refuse(f"bench experts: --shape is {name!r}; choose {' or '.join(known)}")
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    try:
        result = bench.compare(name, known[name], where, dtype, rounds, origin(where))
    except bench.DisagreementError as error:
        _refuse(str(error), code=1)
    tables.show(result.rows)
    slow, fast = bench.IMPLEMENTATIONS
    for phase, race in result.races.items():
        noise = f"the same arm twice differs by {race.noise:.0%}"
        print(f"{phase}: {slow} takes {race.ratio(slow, fast):.2f} times as long as {fast}; {noise}")
    _keep(out, result.rows)


@app.command()
def moe(
    shape: Annotated[str, typer.Option(help="Shapes, by commas; by default the device's own list.")] = "",
    arms: Annotated[str, typer.Option(help="Only these implementations, by commas.")] = "",
    device: DeviceOption = None,
    ms: Annotated[int, typer.Option(min=1, help="Milliseconds spent on each median.")] = 100,
    trained: Annotated[Path | None, typer.Option(help="Saved tensor [T, k] of a trained router's choices.")] = None,
    out: OutOption = None,
    markdown: Annotated[Path | None, typer.Option(help="File for the whole table and its notes.")] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG to draw; needs the group `picture`.")] = None,
    commit: Annotated[str, typer.Option(help="This tree's commit, 12 digits, where there is no git.")] = "",
) -> None:
    """Measure the expert pass beside its peers and the machine's ceilings, in one process."""
    from dormouse_bench.moe import command
    from dormouse_bench.rows import origin

    where = _device(device)
    try:
        shapes = command.names(shape, where)
        options = command.Options(
            device=where, shapes=shapes, arms=command.only(arms, shapes, where),
            budget_ms=ms, origin=origin(where, commit), trained=trained, out=out, markdown=markdown, picture=picture,
        )  # fmt: skip
        wrong = command.run(options)
    except ValueError as error:
        _refuse(str(error))
    if wrong:
        _refuse("\n".join(wrong), code=1)


@app.command()
def sweep(
    device: DeviceOption = None,
    ms: Annotated[int, typer.Option(min=1, help="Milliseconds spent on each median.")] = 20,
    out: OutOption = None,
    commit: Annotated[str, typer.Option(help="This tree's commit, 12 digits, where there is no git.")] = "",
) -> None:
    """Measure which implementation of the expert passes wins over experts, rows, rank and width."""
    from dormouse_bench.moe import sweep as sizes
    from dormouse_bench.rows import origin, write

    where = _device(device)
    kept: list[Row] = []
    wrong: list[str] = []
    try:
        for outcome in sizes.run(sizes.shapes(where), where, ms, origin(where, commit)):
            print(outcome.line(), flush=True)
            kept += outcome.rows
            wrong += outcome.wrong
            if out is not None:
                write(out, kept)
    except ValueError as error:
        _refuse(str(error))
    if wrong:
        _refuse(f"bench sweep: {len(wrong)} implementations disagree with the reference, named above", code=1)


@app.command()
def predict(
    results: Annotated[Path | None, typer.Argument(help="Results of `bench moe` to be held against.")] = None,
    launches: Annotated[bool, typer.Option("--launches", help="Print what each launch moves and holds.")] = False,
) -> None:
    """Predict the latent expert pass on an RTX 5060 Ti from bytes and compiled kernels; needs no GPU."""
    from dormouse_bench.moe import forecast
    from dormouse_bench.rows import RowsError, read

    try:
        held = [] if results is None else forecast.against(read(results))
        made = held + forecast.of_the_card([each.shape for each in held] or ["b1", "b1-zipf"])
    except (RowsError, ValueError) as error:
        _refuse(str(error))
    for each in made:
        if launches:
            print(each.table() + "\n")
        print("\n".join(each.lines()))


@app.command()
def ceilings(device: DeviceOption = None, rounds: RoundsOption = 10, out: OutOption = None) -> None:
    """Measure the machine's own limits: bytes copied a second and the rate of a matrix product."""
    from dormouse_bench import tables
    from dormouse_bench.ceilings import ceilings as measure
    from dormouse_bench.rows import origin

    where = _device(device)
    found = measure(where, rounds, origin(where))
    rows = [ceiling.row for ceiling in found]
    tables.show(rows)
    for ceiling in found:
        print(f"{ceiling.row.phase}: {ceiling.rate:.4g} {ceiling.unit}")
    _keep(out, rows)


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Results files.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a page.")] = False,
) -> None:
    """Check results files against the schema and print their rows as one table."""
    from dormouse_bench import tables
    from dormouse_bench.rows import RowsError, read

    try:
        rows = [row for file in files for row in read(file)]
    except RowsError as error:
        _refuse(f"bench show: {error}")
    if markdown:
        print(tables.markdown(rows))
    else:
        tables.show(rows)


def _device(device: Device | None) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        _refuse("bench: --device cuda, but torch sees no CUDA device here; pass --device cpu")
    return device.value


def _keep(out: Path | None, rows: list[Row]) -> None:
    from dormouse_bench.rows import write

    if out is not None:
        write(out, rows)
        print(f"wrote {len(rows)} rows to {out}")


def _refuse(sentence: str, code: int = 2) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise typer.Exit(code)
