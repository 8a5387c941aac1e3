"""What a person sees of a run: lines that stay, on a terminal a live one below them, and the report at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from dormouse_train.waiting import waiting

if TYPE_CHECKING:
    from dormouse_train.baselines import Baselines
    from dormouse_train.evaluate import Evaluation
    from dormouse_train.optim.optimizer import Row


@dataclass(frozen=True)
class Status:
    """One step as it is shown and logged; `bytes_per_second` is over the steps since the last line."""

    step: int
    steps: int
    loss: float
    train_bpb: float
    lr: float
    grad_norm: float
    max_expert_load: float
    """The busiest expert's rows over the mean: 1 is balanced."""
    dead_experts: int
    """Experts that no byte of the step chose, of `experts`: each counts once an iteration."""
    experts: int
    bytes_per_second: float
    memory_bytes: int
    eta_seconds: float
    skipped: int

    def line(self, width: int | None = None) -> str:
        """The status as one line, the most important first; beyond `width` columns what does not fit is left out."""
        parts = [
            f"step {self.step}/{self.steps}",
            f"loss {self.loss:.4f}",
            f"train {self.train_bpb:.3f} BPB",
            f"{self.bytes_per_second / 1000:.1f} kB/s",
            f"ETA {duration(self.eta_seconds)}",
            *([f"skipped {self.skipped}"] if self.skipped else []),
            f"{self.memory_bytes / 1e6:.0f} MB",
            f"rate {self.lr:.2e}",
            f"|g| {self.grad_norm:.2f}",
            f"load {self.max_expert_load:.1f}x",
            f"dead {self.dead_experts}/{self.experts}",
        ]
        while width is not None and len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)

    def metrics(self) -> dict[str, int | float]:
        """The status as a line of metrics.jsonl."""
        left_out = ("steps", "experts", "eta_seconds")
        return {key: value for key, value in vars(self).items() if key not in left_out}


class Console:
    """`with Console() as console:` shows a run on `file` (stdout), with a live line below where that is a terminal.

    `live` overrides what the file says of itself; `quiet` shows nothing.
    Nothing that came from data or from a model is read as markup, and no control character of it reaches the terminal.
    """

    def __init__(
        self, file: TextIO | None = None, *, live: bool | None = None, quiet: bool = False, width: int | None = None
    ) -> None:
        self._terminal = Terminal(
            file=file,
            width=width,
            force_terminal=live,
            quiet=quiet,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
        )
        self._live: Live | None = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_live()

    @property
    def is_live(self) -> bool:
        """Whether there is a live line, which every status renews."""
        return self._terminal.is_terminal and not self._terminal.quiet

    def note(self, text: str) -> None:
        """One line that stays; characters that the output's encoding lacks become escapes."""
        encoding = self._terminal.encoding
        self._terminal.print(Text(text.encode(encoding, "backslashreplace").decode(encoding)))

    def status(self, status: Status, *, lasting: bool = True) -> None:
        """Print a line that stays where it is `lasting`, and on a terminal renew the live line below it."""
        line = status.line(self._terminal.width if self.is_live else None)
        if lasting:
            self.note(line)
        if not self.is_live:
            return
        if self._live is None:
            self._live = Live(console=self._terminal, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def end_live(self) -> None:
        """Take the live line away and show the cursor again; a later status begins a new one."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def groups(self, rows: Sequence[Row]) -> None:
        """Every parameter group: how it is updated, how many tensors and numbers, its peak rate and decay."""
        self.note(f"{'group':<13} {'update':<7} {'tensors':>7} {'numbers':>10} {'rate':>9} {'decay':>7}")
        for row in rows:
            self.note(
                f"{row.group:<13} {row.method:<7} {row.tensors:>7} {row.numbers:>10,} "
                f"{row.rate:>9.2e} {row.decay:>7.3g}"
            )

    def waiting(self, what: str, nbytes: int, *, counted: bool = True) -> AbstractContextManager[Callable[[int], None]]:
        """What takes long, announced on stderr as `dormouse_train.waiting` does; a quiet console is quiet there too."""
        return nullcontext(lambda done: None) if self._terminal.quiet else waiting(what, nbytes, counted=counted)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """A held-out score with the window it was measured on."""
        self.note(f"step {step}  held-out {evaluation.bpb:.3f} BPB over {evaluation.window_bytes:,} bytes")

    def sample(self, prompt: bytes, written: bytes) -> None:
        """A prompt and what the model wrote after it, indented."""
        self.note("sample")
        for line in shown(prompt + written).split("\n"):
            self.note(f"  | {line}")

    def report(self, evaluation: Evaluation, baselines: Baselines, entropy: float | None = None) -> None:
        """The end of a run: the model's score beside those of simpler models, and of the best possible."""
        part = "all" if baselines.fitted_bytes == baselines.train_bytes else f"{baselines.fitted_bytes:,} of the"
        self.note(f"on the same {evaluation.window_bytes:,} held-out bytes, in bits a byte (BPB), the others fitted on")
        self.note(f"{part} {baselines.train_bytes:,} training bytes:")
        rows = {"this model": evaluation.bpb}
        for context, bits in enumerate(baselines.ngram):
            rows["unigram" if context == 0 else f"n-gram, {context} byte{'s' * (context > 1)} of context"] = bits
        rows["xz(train+held) - xz(train)"] = baselines.xz
        for name, bits in rows.items():
            self.note(f"  {name:<28} {bits:.3f}{'  beaten' if bits > evaluation.bpb else ''}")
        if entropy is not None:
            self.note(f"  {'entropy of the source':<28} {entropy:.3f}")


def shown(data: bytes) -> str:
    """`data` as text that is safe on a terminal: all but printable characters, newline and tab become escapes."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def duration(seconds: float) -> str:
    """Whole seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
