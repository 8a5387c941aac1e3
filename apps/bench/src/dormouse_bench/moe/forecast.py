"""`bench predict`: the predictor held against kept results, then asked about a card that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dormouse_bench.moe import cards
from dormouse_bench.moe.arms import OURS
from dormouse_bench.moe.cards import Card
from dormouse_bench.moe.command import rates_of
from dormouse_bench.moe.costs import Rates
from dormouse_bench.moe.predict import Predicted, predict, predictable, total_ms
from dormouse_bench.moe.shapes import SHAPES
from dormouse_bench.rows import Row

PHASES = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Forecast:
    """One shape on one card: its launches, and what was measured of its phases there."""

    card: Card
    shape: str
    launches: list[Predicted]
    measured: dict[str, float]

    def lines(self) -> list[str]:
        """A line a phase, marked as a prediction; with the error where there is a measurement."""
        said = []
        for phase in PHASES:
            ms = total_ms(self.launches, phase)
            line = f"{self.card.name}: {self.shape} {phase}: predicted {ms:.4g} ms"
            if phase in self.measured:
                line += f", measured {self.measured[phase]:.4g} ms: {ms / self.measured[phase] - 1:+.1%}"
            said.append(line)
        return said

    def table(self) -> str:
        """The launches as a Markdown table."""
        head = ("launch", "phase", "MB", "registers", "shared", "blocks an SM", "waves", "predicted µs")
        rule = ("---", "---", *["---:"] * 6)
        body = [
            (
                each.launch.name, each.launch.phase, f"{each.cost.bytes / 1e6:.1f}", str(each.compiled.registers),
                f"{each.compiled.shared:,}", str(each.resident), f"{each.waves:.2f}", f"{each.ms * 1e3:.0f}",
            )
            for each in self.launches
        ]  # fmt: skip
        lines = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
        return f"{self.card.name}, {self.shape}, predicted:\n\n{lines}"


def against(rows: Sequence[Row]) -> list[Forecast]:
    """The predictor on the results' own card at their own ceilings. Errors: `ValueError` for a card not known here."""
    machines = {row.machine for row in rows}
    if len(machines) != 1 or not machines <= cards.MEASURED.keys():
        raise ValueError(
            f"bench predict: the results are of {', '.join(sorted(machines)) or 'nothing'}; pass results of one of "
            f"{', '.join(cards.MEASURED)}"
        )
    ours = [row for row in rows if row.bench == "moe" and row.implementation == OURS and row.shape in SHAPES]
    names = [name for name in dict.fromkeys(row.shape for row in ours) if predictable(SHAPES[name])]
    if not names:
        raise ValueError(f"bench predict: the results hold no {OURS} row of a shape that is predicted, like b1")
    card, rates = cards.MEASURED[machines.pop()], rates_of(rows)
    measured = {(row.shape, row.phase): row.ms for row in ours}
    return [
        _forecast(card, name, rates, {phase: measured[name, phase] for phase in PHASES if (name, phase) in measured})
        for name in names
    ]


def of_the_card(names: Sequence[str]) -> list[Forecast]:
    """Shapes on the RTX 5060 Ti, from its data sheet."""
    return [_forecast(cards.RTX_5060_TI, name, cards.RTX_5060_TI_RATES, {}) for name in names]


def _forecast(card: Card, name: str, rates: Rates, measured: dict[str, float]) -> Forecast:
    return Forecast(card, name, predict(SHAPES[name], card, rates), measured)
