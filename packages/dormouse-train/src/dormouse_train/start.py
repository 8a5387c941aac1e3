"""Beginning a run and going on with one: everything that can be wrong is found before the first step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from dormouse_model.layout import latest_step

from dormouse_train import events, report, run_folder
from dormouse_train.config import Config, assemble, load_config
from dormouse_train.data import Corpus, open_batches, open_corpus
from dormouse_train.data.sources import pinned
from dormouse_train.device import settled
from dormouse_train.errors import UserError, out_of_memory
from dormouse_train.metrics import Metrics
from dormouse_train.signals import AS_IT_WAS, NOTHING_KEPT, before_leaving, tell

if TYPE_CHECKING:
    from dormouse_train.console import Console
    from dormouse_train.data import Corpus
    from dormouse_train.loop import Result

LOOP = "dormouse_train.loop"
ON_CUDA = "small"
"""The configuration of a run that names none, where its device is CUDA; `load_config` knows the other."""


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    run: Path | str | None = None,
    resume: bool = False,
    sets: Sequence[str] = (),
    overrides: Mapping[str, object] | None = None,
    console: Console | None = None,
) -> Result:
    """Train `config` in the folder `run`, and return how it ended: the folder, the step and the held-out BPB.

    `config` is a name, a TOML file, its tables as a dict, or a `Config`. None is `nano` on a CPU and `small` on CUDA,
    or the run's own on a resume.
    `sets` are `key=value` as on the command line, `overrides` dotted keys with values; neither goes with a `Config`.
    Without `run` a new folder is made under `runs/`, and a `resume` means the newest there. A resume goes on from the
    newest checkpoint, or from step 0 where none was written, bit for bit as if the run had not been interrupted; of a
    run that is finished it shows what it came to. A new run that a signal stops before its first step leaves nothing.
    Errors: `UserError` and `ConfigError` before the first step; a run that could not begin leaves no folder behind.
    """
    if resume:
        folder = run_folder.newest() if run is None else Path(run)
        saved = run_folder.tables(folder)
        chosen = assemble(saved, sets, overrides) if config is None else _configuration(config, sets, overrides)
        if chosen.train.device == "auto":
            chosen = _with_device(chosen, assemble(saved).train.device)
        with run_folder.locked(folder):
            return _go_on(_pinned(chosen), folder, console)
    chosen = _pinned(_configuration(config, sets, overrides))
    made = run is None or not Path(run).exists()
    folder = run_folder.create(None if run is None else Path(run))
    with run_folder.locked(folder):
        run_folder.clear_start(folder)
        with _undone_on_error(folder, made=made):
            on_cuda = partial(load_config, ON_CUDA, sets, overrides) if config is None else None
            chosen, corpus = _prepare(chosen, folder, console, on_cuda=on_cuda)
            _check_init(chosen)
            run_folder.write_config(folder, chosen)
            import_module(LOOP)  # torch with it, which takes seconds: interrupted meanwhile, nothing is left behind
        result = _loop(chosen, folder, corpus, resume=False, console=console)
        if result.step == 0:
            rmtree(folder / events.FOLDER, ignore_errors=True)
            run_folder.undo(folder, made=made)
            _tell(NOTHING_KEPT, console)
        return result


def _configuration(
    config: Config | Mapping[str, Any] | str | Path | None, sets: Sequence[str], overrides: Mapping[str, object] | None
) -> Config:
    if not isinstance(config, Config):
        return load_config(config, sets, overrides)
    if sets or overrides:
        raise ValueError("train: sets and overrides change a named configuration; give a changed Config instead")
    return config


def _go_on(config: Config, folder: Path, console: Console | None) -> Result:
    with before_leaving(partial(tell, AS_IT_WAS)):
        if (ended := report.kept(folder, config)) is not None:
            run_folder.reopen(folder, config)
            if config.log.tensorboard:
                events.require()
                with events.opened(folder):
                    pass  # what was logged is all that there will be
            return _finished(folder, ended, console)
        config, corpus = _prepare(config, folder, console)
        run_folder.reopen(folder, config)
        saved = latest_step(folder) is not None
        if not saved:
            _check_init(config)
            Metrics(folder).cut_back(0)
        import_module(LOOP)
    result = _loop(config, folder, corpus, resume=saved, console=console)
    if result.step == 0:
        _tell(AS_IT_WAS, console)
    return result


def _tell(text: str, console: Console | None) -> None:
    if console is not None:
        tell(text)


def _finished(folder: Path, ended: report.Report, console: Console | None) -> Result:
    """What the run came to, from its kept numbers. Errors: `UserError` where its last checkpoint is damaged."""
    from dormouse_model import checkpoint

    from dormouse_train.evaluate import Evaluation
    from dormouse_train.loop import Result

    try:
        checkpoint.verify(checkpoint.checkpoint_folder(folder, ended.step))
    except checkpoint.CheckpointError as error:
        raise UserError(str(error)) from None
    if console is not None:
        console.note(f"run {folder} is finished, at step {ended.step} of {ended.step}; nothing is left to do")
        scored = Evaluation(ended.heldout_bpb, ended.window_bytes)
        console.evaluation(ended.step, scored)
        console.report(scored, ended.baselines, ended.entropy)
    return Result(0, ended.step, folder, ended.heldout_bpb, ended.window_bytes, ended.baselines)


def _prepare(
    config: Config, folder: Path, console: Console | None, *, on_cuda: Callable[[], Config] | None = None
) -> tuple[Config, Corpus]:
    """Open the data before torch is imported, which is slow; then settle the device, one that was asked for at first.

    `on_cuda` makes the configuration to take instead where that device is CUDA.
    """
    if config.log.tensorboard:
        events.require()
    if config.train.device == "cuda":
        settled("cuda")  # refused before gigabytes of data are read
    corpus = open_corpus(config.data, folder)
    _refuse_short(corpus, config)
    if console is not None:
        sizes = f"{len(corpus.train):,} bytes to train on, {len(corpus.heldout):,} held out"
        console.note(f"run {folder}: {corpus.name}, {sizes}")
    device = settled(config.train.device)
    if device == "cuda" and on_cuda is not None:
        config = _pinned(on_cuda())
        _refuse_short(corpus, config)
    return _with_device(config, device), corpus


def _refuse_short(corpus: Corpus, config: Config) -> None:
    """The error of data that holds no batch."""
    open_batches(config, corpus.train)


def _check_init(config: Config) -> None:
    """Errors: `UserError` naming the first of the weights of `train.init` that is not of this model."""
    if not config.train.init:
        return
    from dormouse_model import Dormouse
    from dormouse_model.checkpoint import CheckpointError
    from dormouse_model.weights import mismatch, weights_file

    try:
        wrong = mismatch(Dormouse(config.architecture, device="meta"), weights_file(config.train.init))
    except CheckpointError as error:
        raise UserError(f"--init: {str(error).partition(': ')[2]}") from None
    if wrong is not None:
        raise UserError(f"--init: {wrong}; give weights of one configuration with --config")


def _with_device(config: Config, device: str) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"device": device})})


def _pinned(config: Config) -> Config:
    """Data paths as absolute ones: a run goes on from whatever folder the command is given in."""
    data = config.data
    paths = {"paths": tuple(map(pinned, data.paths)), "val": tuple(map(pinned, data.val))}
    train = config.train.model_copy(update={"init": pinned(config.train.init) if config.train.init else ""})
    return config.model_copy(update={"data": data.model_copy(update=paths), "train": train})


def _loop(config: Config, folder: Path, corpus: Corpus, *, resume: bool, console: Console | None) -> Result:
    from dormouse_train import loop
    from dormouse_train.checkpoint import seed_generators

    seed_generators(config.train.seed)
    try:
        return loop.train(config, folder, corpus=corpus, resume=resume, console=console)
    except (RuntimeError, MemoryError) as error:
        if (memory := out_of_memory(error)) is None:
            raise
        # A resume refuses whatever would make the run smaller: it would be another one.
        mend = "a lower train.batch (and train.accumulate higher by as much), train.seq or model"
        raise UserError(
            f"train: {memory}; free memory and go on with --resume, or start a new run with {mend}"
        ) from None


@contextmanager
def _undone_on_error(folder: Path, *, made: bool) -> Generator[None]:
    """A run that could not begin must not stand in the way of the next try under the same name."""
    undo = partial(run_folder.undo, folder, made=made)

    def stopped() -> None:
        undo()
        tell(NOTHING_KEPT)

    try:
        with before_leaving(stopped):
            yield
    except BaseException:
        with suppress(OSError):  # what went wrong first is what is told
            undo()
        raise
