"""What an expert pass must at least move and compute: the floor under every arm, whoever wrote it.

Bytes are those of device memory, each tensor of the pass read once and written once; nothing that an implementation
adds for itself (padding, sorted copies, saved activations beyond the latents) counts. "Expanded" passes write a row for
each choice of a token and read it back to add them up; the floor without has no such rows and reads each token once.
Experts that no token chose are not read, their gradients are written as zeros.
Letters: R = T·k rows, A experts with rows, d, r, f as in `shapes`; the latents are [p, q], two ranks a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from dormouse_bench.moe.shapes import Shape


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating point operations of one part; a multiplication and an addition count apart."""

    bytes: int
    flops: int

    def floor_ms(self, rates: Rates) -> float:
        """The longer of moving the bytes and computing."""
        return 1e3 * max(self.bytes / rates.bytes_per_second, self.flops / rates.flops_per_second)


@dataclass(frozen=True)
class Rates:
    """What the machine's own ceilings reach: a copy (bytes read and written) and a matrix product."""

    bytes_per_second: float
    flops_per_second: float


def routed(shape: Shape, phase: str, *, itemsize: int, active: int | None = None, expanded: bool = False) -> Cost:
    """The routed part of `phase` "fwd" or "bwd": x to h, and dh to dx and the weight gradients.

    `active` experts have rows (None: all). `expanded`: rows of each choice are written and read back, gathers read a
    token k times, and the latents pass through memory.
    """
    tokens, rows, d, r, f = shape.tokens, shape.rows, shape.d, shape.r, shape.f
    active = shape.experts if active is None else active
    bank = 2 * r * d + f * r
    latents = 2 * r * rows
    if phase == "fwd":
        elements = active * bank + tokens * (d + f)
        if expanded:
            # x k times; p and q kept, z written and read; h of each choice written and read, then h
            elements = active * bank + rows * d + latents + rows * r * 2 + rows * f * 2 + tokens * f
        return Cost(elements * itemsize, routed_flops(shape))
    if phase != "bwd":
        raise ValueError(f"routed: phase is {phase!r}; pass 'fwd' or 'bwd'")
    elements = (active + shape.experts) * bank + tokens * (f + 2 * d)
    if expanded:
        # dh and x k times; p and q read, their gradients written and read; dx of each choice written and read, then dx
        elements = (active + shape.experts) * bank + rows * (f + d) + 3 * latents + rows * d * 2 + tokens * d
    return Cost(elements * itemsize, 2 * routed_flops(shape))


def routed_flops(shape: Shape) -> int:
    """Useful operations of the routed forward; a backward has twice as many."""
    return shape.rows * (4 * shape.r * shape.d + 2 * shape.r * shape.f)


def shared(shape: Shape, phase: str, *, itemsize: int) -> Cost:
    """The shared expert, whose h is handed to the routed pass as a residual: written and read once."""
    tokens, d, r, f = shape.tokens, shape.d, shape.shared_rank, shape.f
    weights = 2 * r * d + f * r
    flops = tokens * (4 * r * d + 2 * r * f)
    if phase == "fwd":
        return Cost((weights + tokens * (d + 2 * f)) * itemsize, flops)
    # dh is read by the routed pass too, and counted there once: here again, as a pass of its own
    return Cost((2 * weights + tokens * (f + 2 * d)) * itemsize, 2 * flops)


def down(shape: Shape, phase: str, *, itemsize: int) -> Cost:
    """The dense W_down [d, f] over h: a product forward, two backward."""
    tokens, d, f = shape.tokens, shape.d, shape.f
    flops = 2 * tokens * d * f
    if phase == "fwd":
        return Cost((d * f + tokens * (d + f)) * itemsize, flops)
    return Cost((2 * d * f + tokens * (d + 2 * f)) * itemsize, 2 * flops)


def whole(
    shape: Shape, phase: str, *, itemsize: int, active: int | None = None, expanded: bool = False
) -> tuple[Cost, ...]:
    """The parts of "fwd", "bwd" or "fwd+bwd" that run one after another: their floors add up."""
    parts: list[Cost] = []
    for each in phase.split("+"):
        parts.append(routed(shape, each, itemsize=itemsize, active=active, expanded=expanded))
        if shape.shared_rank:
            parts += [shared(shape, each, itemsize=itemsize), down(shape, each, itemsize=itemsize)]
    return tuple(parts)


def floor_ms(parts: tuple[Cost, ...], rates: Rates) -> float:
    """Milliseconds that the parts take at best, one after another."""
    return sum(part.floor_ms(rates) for part in parts)


def combine(shape: Shape, *, itemsize: int) -> Cost:
    """Adding up the k rows of each token: [R, f] read, [T, f] written."""
    return Cost((shape.rows + shape.tokens) * shape.f * itemsize, shape.rows * shape.f)
