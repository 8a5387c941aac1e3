"""The training loop: steps, and at their cadences a line, an evaluation, a sample and a checkpoint; then the report."""

from __future__ import annotations

import gc
import math
import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from dormouse_kernels import Counters
from dormouse_model import Dormouse, generate
from dormouse_model.sampling import NonFiniteLogits
from dormouse_model.weights import install, weights_file

from dormouse_train import events
from dormouse_train.baselines import Baselines, measure
from dormouse_train.checkpoint import Checkpoint, RandomState
from dormouse_train.config import Config
from dormouse_train.console import Console, Status
from dormouse_train.data import Corpus, open_batches, open_corpus
from dormouse_train.device import settled
from dormouse_train.evaluate import Evaluation, evaluate, window
from dormouse_train.metrics import Metrics, read
from dormouse_train.optim.optimizer import Optimizer
from dormouse_train.optim.schedule import rate
from dormouse_train.progress import Progress
from dormouse_train.report import Report
from dormouse_train.segments import Carried
from dormouse_train.signals import Signals, StopRequested
from dormouse_train.step import StepResult, train_step

SAMPLES = "samples"
SAMPLE_TEMPERATURE = 0.8
COLLECT_EVERY = 200
"""Steps between garbage collections."""


@dataclass(frozen=True)
class Result:
    """How a run ended. The scores are None where a signal stopped it before they were measured."""

    exit_code: int
    """0 at the end, 128 + the signal that asked it to stop (130, 143)."""
    step: int
    run: Path
    """The folder of the run."""
    heldout_bpb: float | None = None
    window_bytes: int | None = None
    baselines: Baselines | None = None


def train(
    config: Config, run: Path, *, corpus: Corpus | None = None, resume: bool = False, console: Console | None = None
) -> Result:
    """Train `config` in the folder `run` up to `train.steps`, from its newest checkpoint on where `resume` is true.

    Writes metrics.jsonl, samples, checkpoints and at the end report.json; shows itself on `console` (None: nowhere).
    `corpus` is the run's own where it is open already: opening reads every byte. SIGINT or SIGTERM finish the step,
    save and return with exit code 130 or 143.
    Errors: `UserError` for data that is too short, a checkpoint that does not fit, a full disk, or more than
    `train.max_skipped` non-finite steps in a row.
    """
    console = console or Console(quiet=True)
    with (
        Signals() as signals,
        Counters() as counters,
        console,
        _garbage_collected_between_steps(),
        _threads(config.train.threads),
    ):
        loop = _Loop(config, run, corpus or open_corpus(config.data, run), console, signals, counters)
        if resume:
            loop.resume()
        elif config.train.init:
            install(loop.model, weights_file(config.train.init))
        with events.opened(run) if config.log.tensorboard else nullcontext() as mirror:
            if mirror is not None:
                loop.metrics.also.append(mirror.write)
            return loop.run()


class _Loop:
    """One run in one process."""

    def __init__(
        self, config: Config, run: Path, corpus: Corpus, console: Console, signals: Signals, counters: Counters
    ) -> None:
        keys = config.train
        self.config, self.folder, self.console, self.signals, self.counters = config, run, console, signals, counters
        self.device = torch.device(settled(keys.device))
        self.corpus = corpus
        self.batches = open_batches(config, self.corpus.train)
        self.model = Dormouse(config.architecture, seed=keys.seed, device=self.device)
        self.optimizer = Optimizer(self.model, config.optim, keys.lr)
        self.progress = Progress(counters)
        self.metrics = Metrics(run)
        self.checkpoint = (
            Checkpoint(run, keep=config.checkpoint.keep)
            .add("model", self.model)
            .add("optimizer", self.optimizer)
            .add("progress", self.progress)
            .add("rng", RandomState(self.device))
        )
        self.carried = Carried(self.model, keys.batch, keys.accumulate) if config.carries_across_steps else None
        if self.carried is not None:
            self.checkpoint.add("carried", self.carried)
        self.saved_step: int | None = None
        self.scored: set[tuple[object, object]] = set()
        """(step, bytes) of the evaluations that metrics.jsonl holds."""
        self.since_line = (0, 0.0)
        """Bytes and seconds since the last line."""

    def resume(self) -> None:
        """Load the newest checkpoint and cut metrics.jsonl back to it."""
        self.saved_step = self.checkpoint.load()
        self.metrics.cut_back(self.saved_step)
        self.scored = {(line["step"], line["window_bytes"]) for line in read(self.folder) if "window_bytes" in line}

    def run(self) -> Result:
        """Step to the end and report, or stop where a signal asks for it."""
        keys = self.config
        self._introduce()
        # What exists by now is never garbage: later collections need not look at it.
        gc.collect()
        gc.freeze()
        if self.saved_step is not None:
            self._look()
        while self.progress.step < keys.train.steps and not self.signals.requested:
            self._step()
            step = self.progress.step
            # Saved before it is looked at, so that an evaluation that is killed loses no step: a resume looks again.
            if step == keys.train.steps or _due(step, keys.checkpoint.every):
                self._save()
            self._look()
        if not self.signals.requested:
            self.console.end_live()
            with suppress(StopRequested):
                return self._report()
        return self._stopped()

    def _introduce(self) -> None:
        numbers = sum(parameter.numel() for parameter in self.model.parameters())
        threads = torch.get_num_threads()
        on_cpu = f"{threads} thread{'s' if threads > 1 else ''}"
        where = on_cpu if self.device.type == "cpu" else torch.cuda.get_device_name()
        self.console.note(f"{numbers:,} parameters on {self.device.type} ({where})")
        if self.config.train.init:
            self.console.note(f"begun with the weights of {self.config.train.init}")
        self.console.groups(self.optimizer.table())
        if self.progress.step:
            self.console.note(f"going on after step {self.progress.step}")

    def _step(self) -> None:
        keys = self.config.train
        begin = perf_counter()
        result = train_step(
            self.model, self.optimizer, self.batches, self.progress.step, self.config, self.device, self.carried
        )
        seconds, nbytes = perf_counter() - begin, keys.batch * keys.seq * keys.accumulate
        self.progress.add(skipped=result.skipped, nbytes=nbytes, seconds=seconds)
        self.since_line = (self.since_line[0] + nbytes, self.since_line[1] + seconds)
        self._tell(result)
        self.progress.refuse_endless_skips(keys.max_skipped)
        if self.progress.step % COLLECT_EVERY == 0:
            gc.collect()

    def _tell(self, result: StepResult) -> None:
        """A lasting line at `log.every`, at the first and at the last step; a live line is renewed every step."""
        keys, step = self.config.train, self.progress.step
        logged = step in (1, keys.steps) or _due(step, self.config.log.every)
        if not logged and not self.console.is_live:
            return
        status = self._status(result)
        self.console.status(status, lasting=logged)
        if logged:
            self.metrics.write(status.metrics() | {"seconds": self.progress.seconds} | self._counted())
            self.since_line = (0, 0.0)

    def _status(self, result: StepResult) -> Status:
        keys, step, counts = self.config.train, self.progress.step, result.expert_counts
        speed = self.since_line[0] / max(self.since_line[1], 1e-9)
        left = (keys.steps - step) * keys.batch * keys.seq * keys.accumulate
        return Status(
            step=step,
            steps=keys.steps,
            loss=result.loss,
            train_bpb=result.train_bpb,
            lr=keys.lr * rate(step - 1, keys),
            grad_norm=result.grad_norm,
            max_expert_load=float((counts.amax(-1) * counts.shape[-1] / counts.sum(-1).clamp(min=1)).max()),
            dead_experts=int((counts == 0).sum()),
            experts=counts.numel(),
            bytes_per_second=speed,
            memory_bytes=_memory_bytes(self.device),
            eta_seconds=left / speed,
            skipped=self.progress.skipped,
        )

    def _counted(self) -> dict[str, int]:
        return {f"counters.{key}": value for key, value in self.counters.snapshot().items()}

    def _look(self) -> None:
        """Evaluate and sample where that is due, or give it up for a stop.

        A checkpoint holds the counters of before: a resume from it looks again, and counts it then.
        """
        keys, step = self.config, self.progress.step
        if step >= keys.train.steps or not _due(step, keys.eval.every):
            return
        counted = self.counters.snapshot()
        try:
            self._evaluate(keys.eval.window_bytes)
            self._sample()
            self.signals.check()  # a stop in the last piece too: what was counted is counted again by the resume
        except StopRequested:
            self.counters.load(counted)

    def _evaluate(self, wanted: int, *, advance: Callable[[int], None] | None = None) -> Evaluation:
        scored = evaluate(self.model, self.corpus.heldout, wanted, check=self.signals.check, advance=advance)
        step, window_bytes = self.progress.step, scored.window_bytes
        self.console.evaluation(step, scored)
        if (step, window_bytes) not in self.scored:  # a resume looks, or reports, again
            self.metrics.write({"step": step, "heldout_bpb": scored.bpb, "window_bytes": window_bytes})
            self.scored.add((step, window_bytes))
        return scored

    def _sample(self) -> None:
        keys, written = self.config.eval, b""
        if not keys.sample_bytes:
            return
        prompt = keys.prompt.encode("utf-8", "surrogateescape")
        try:
            self.signals.check()
            for byte in generate(self.model, prompt, keys.sample_bytes, temperature=SAMPLE_TEMPERATURE):
                written += byte
                self.signals.check()
        except NonFiniteLogits:  # the steps that follow are skipped, and `train.max_skipped` of them end the run
            self.console.note(f"no sample at step {self.progress.step}: the model's logits are not finite")
            return
        file = self.folder / SAMPLES / f"step-{self.progress.step}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(prompt + written)
        self.console.sample(prompt, written)

    def _save(self) -> None:
        if self.saved_step != self.progress.step:
            self.checkpoint.save(self.progress.step)
            self.saved_step = self.progress.step

    def _stopped(self) -> Result:
        self.console.end_live()
        if self.progress.step:
            self._save()
            self.console.note(f"stopped and saved at step {self.progress.step}; --resume --run {self.folder} goes on")
        return Result(self.signals.exit_code, self.progress.step, self.folder)

    def _report(self) -> Result:
        """Score the model and the baselines on the same held-out bytes, and sample; the weights are saved by now."""
        keys, step = self.config.eval, self.progress.step
        chosen = window(len(self.corpus.heldout), keys.final_window_bytes)
        with self.console.waiting("evaluating", chosen.nbytes) as advance:
            scored = self._evaluate(keys.final_window_bytes, advance=advance)
        self.signals.check()
        with self.console.waiting("fitting n-gram models and xz", len(self.corpus.train), counted=False):
            others = measure(self.corpus.train, chosen.over(self.corpus.heldout), check=self.signals.check)
        self.console.report(scored, others, self.corpus.entropy)
        self._sample()
        if math.isfinite(scored.bpb):
            Report(step, scored.bpb, scored.window_bytes, others, self.corpus.entropy).save(self.folder)
        return Result(self.signals.exit_code, step, self.folder, scored.bpb, scored.window_bytes, others)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _memory_bytes(device: torch.device) -> int:
    """The most that was held so far: of the device's memory, or of the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _garbage_collected_between_steps() -> Generator[None]:
    """Python's collector off while training, so that it does not stall a step; `_Loop` calls it now and then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _threads(wanted: int) -> Generator[None]:
    """Torch's CPU threads while training, 0 leaving them as they are; the caller's number is given back."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
