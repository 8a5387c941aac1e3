"""Odd quintics whose composition maps every singular value in [lower, 1] as near to 1 as a given number allows.

Each step takes the minimax quintic p(x) = a·x + b·x³ + c·x⁵ on the interval that the steps before it left, which is
optimal for the composition too: N. Amsel et al., "The Polar Express", arXiv 2505.16932, theorem 3.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Quintic(NamedTuple):
    """p(x) = a·x + b·x³ + c·x⁵."""

    a: float
    b: float
    c: float

    def __call__(self, x: float) -> float:
        return x * (self.a + x * x * (self.b + x * x * self.c))


LOWER: dict[int, float] = {3: 2e-2, 4: 5e-3, 5: 1.5e-3}
"""The smallest singular value, relative to the normaliser, that each number of steps is designed for."""

DESIGNED: dict[int, tuple[Quintic, ...]] = {
    3: (
        Quintic(7.71096924586768, -22.1137547904812, 16.2487430177385),
        Quintic(3.21527598730774, -2.41117201025578, 0.501300013614882),
        Quintic(2.21830775242379, -1.59398962291583, 0.4107478875105),
    ),
    4: (
        Quintic(8.29870349143753, -24.4304981482177, 18.0903041930787),
        Quintic(3.91522096046062, -2.92113023218352, 0.559223259813089),
        Quintic(3.17460365705577, -2.38043283389544, 0.497826393519909),
        Quintic(2.18946283979355, -1.56722068345583, 0.40788715799558),
    ),
    5: (
        Quintic(8.44850460046183, -25.0218889068917, 18.5607116339779),
        Quintic(4.14686043868934, -3.08367846369368, 0.577752963511203),
        Quintic(3.83288402902805, -2.86271280960956, 0.552568702286516),
        Quintic(2.99737696526541, -2.24465210694168, 0.482521200883328),
        Quintic(2.08424812156525, -1.46686229450042, 0.397264126544296),
    ),
}
"""`design(steps, LOWER[steps])` for every number of steps on offer; a test derives them anew."""


def design(steps: int, lower: float) -> tuple[Quintic, ...]:
    """`steps` quintics whose composition is within `worst_error` of 1 on [lower, 1], the least that is possible.

    They only work whole and in order: the first ones of a longer design leave values near 2.
    Errors: `ValueError` for steps < 1 or lower outside (0, 1).
    """
    if steps < 1:
        raise ValueError(f"design: steps is {steps}; pass at least 1")
    if not 0 < lower < 1:
        raise ValueError(f"design: lower is {lower}; pass a value inside (0, 1)")
    quintics = []
    low, high = lower, 1.0
    for _ in range(steps):
        quintic = minimax(low, high)
        quintics.append(quintic)
        low = quintic(low)
        high = 2 - low
    return tuple(quintics)


def worst_error(quintics: tuple[Quintic, ...], lower: float) -> float:
    """`max |1 − p_n(…p_1(x)…)|` over [lower, 1], from the alternation that `design` leaves at the left end."""
    value = lower
    for quintic in quintics:
        value = quintic(value)
    return abs(1 - value)


def minimax(low: float, high: float) -> Quintic:
    """The odd quintic nearest to 1 on [low, high], by Remez exchange on its four alternation points.

    The error alternates −E, +E, −E, +E at low, q, r, high, where q and r are the extrema of p.
    """
    if high - low < 1e-5 * high:
        # four alternation points no longer separate in fp64: the Taylor quintic about the middle is as good
        middle = (low + high) / 2
        return Quintic(15 / (8 * middle), -10 / (8 * middle**3), 3 / (8 * middle**5))
    inner = (0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high)
    previous = math.inf
    while True:
        points = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, error = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        if abs(previous - error) <= 1e-14:
            return Quintic(a, b, c)
        previous = error
        # p'(x) = a + 3b·x² + 5c·x⁴ = 0
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = (math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c)))
