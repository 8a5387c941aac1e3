"""`dormouse info`: what a run is and how far it came."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dormouse_train import run_folder
from dormouse_train.config import Config, assemble
from dormouse_train.data import manifest
from dormouse_train.metrics import Value, read
from dormouse_train.plot import save


def command(run: Path, plot: Path | None = None) -> int:
    """Print a few lines; a damaged checkpoint is named and is no error, as showing it is what was asked for.

    `plot` is a file to draw the run's curves to.
    """
    config = assemble(run_folder.tables(run, argument="RUN"))
    for name, text in _rows(run, config):
        print(f"{name:<12} {text}", flush=True)
    if plot is not None:
        save(run, plot)
        print(f"{'picture':<12} {plot}", flush=True)
    return 0


def _rows(run: Path, config: Config) -> Iterator[tuple[str, str]]:
    yield "run", str(run)
    if (run / manifest.NAME).exists():
        data = manifest.load(run)
        test = f", {data.test_bytes:,} for a test" if data.test_bytes else ""
        sizes = f"{data.train_bytes:,} bytes to train on, {data.heldout_bytes:,} held out{test}"
        yield "data", f"{data.name}: {len(data.files)} files, {sizes}"
    yield "model", _model(config)
    train = config.train
    rows = f"{train.batch * train.accumulate} x {train.seq} bytes a step"
    yield "training", f"{train.steps} steps, {rows}, {train.schedule}, seed {train.seed}, {train.device}"
    for step, verdict in _checkpoints(run):
        yield "checkpoint", f"step {step}: {verdict}"
    lines = read(run)
    for name, key in (("trained", "train_bpb"), ("held-out", "heldout_bpb")):
        if (last := next((line for line in reversed(lines) if key in line), None)) is not None:
            yield name, _score(last, key)


def _score(line: dict[str, Value], key: str) -> str:
    value, nbytes = line[key], line.get("window_bytes")
    window = f" over {nbytes:,} bytes" if isinstance(nbytes, int) else ""
    score = f"{value:.3f} BPB" if isinstance(value, int | float) else "not finite"
    return f"{score} at step {line['step']}{window}"


def _model(config: Config) -> str:
    from dormouse_model import ledger
    from dormouse_model.parameter_ledger import dense_difference

    model, experts = config.model, config.experts
    if experts.kind == "dense":
        more = dense_difference(config.architecture)
        size = f"width {experts.swiglu_widths(model.d_model)[0]} ({more:+,} parameters beside two-latent experts)"
    else:
        size = f"rank {experts.rank}"
    shape = f"d {model.d_model}, {model.iterations} iterations, {experts.num_experts} experts of {size}"
    return f"{ledger(config.architecture)['total']:,} parameters: {shape}, {experts.top_k} a byte"


def _checkpoints(run: Path) -> Iterator[tuple[int, str]]:
    from dormouse_model import checkpoint

    for step in checkpoint.steps(run):
        try:
            files = checkpoint.verify(checkpoint.checkpoint_folder(run, step))["files"]
        except (checkpoint.CheckpointError, FileNotFoundError) as error:
            if checkpoint.checkpoint_folder(run, step).exists():  # a run in progress drops its oldest
                yield step, f"damaged ({error})"
        else:
            yield step, f"whole, {sum(file['bytes'] for file in files.values()):,} bytes"
