"""A synthetic source whose entropy is known exactly: what a model reaches on it can be held against the best possible.

Eight letters, `a` to `h`. Every context of `order` letters has its own permutation of the letters, and the next letter
is the one at a rank drawn with the probabilities 1/2, 1/4, ..., 1/128, 1/128. As all contexts share these, the entropy
rate is theirs whatever the contexts' own frequencies: H = -sum p log2 p = 127/64 = 1.984375 bits a byte, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dormouse_train.errors import UserError

PREFIX = "markov:"
LETTERS = b"abcdefgh"
BITS = (1, 2, 3, 4, 5, 6, 7, 7)
"""-log2 of the probability of each rank."""
MAX_ORDER = 6
DEFAULT_BYTES = 8 << 20
CHUNK = 1 << 18

_LETTER_OF = LETTERS.ljust(256, b"?")
# Of a random byte: its number of leading zeros is the rank, so that the probabilities are exact.
_RANKS = bytes(min(8 - value.bit_length(), len(BITS) - 1) for value in range(256))


@dataclass(frozen=True)
class Markov:
    """`Markov(order, seed, nbytes)`: a chain over 8 letters, each drawn given the `order` letters before it.

    The bytes are a function of the three numbers alone: generated anew wherever they are read, in constant memory.
    """

    order: int
    seed: int
    nbytes: int = DEFAULT_BYTES

    @classmethod
    def parse(cls, text: str) -> Markov:
        """The source that `markov:ORDER:SEED` or `markov:ORDER:SEED:BYTES` names. Errors: `UserError`."""
        numbers = text.removeprefix(PREFIX).split(":")
        if len(numbers) not in (2, 3) or not all(number.isascii() and number.isdigit() for number in numbers):
            raise UserError(f"data: {text} is no source; write markov:ORDER:SEED or markov:ORDER:SEED:BYTES")
        source = cls(*map(int, numbers))
        if not 1 <= source.order <= MAX_ORDER or source.seed >= 2**63:
            raise UserError(f"data: {text}: the order is 1 to {MAX_ORDER} and the seed below 2^63; give such numbers")
        return source

    @property
    def name(self) -> str:
        """What a manifest calls it, which `parse` reads."""
        return f"{PREFIX}{self.order}:{self.seed}:{self.nbytes}"

    @property
    def entropy(self) -> float:
        """Bits a byte that no model of the source can be below in the mean."""
        return sum(bits * 2.0**-bits for bits in BITS)

    def spread(self, nbytes: int) -> float:
        """Standard deviation of the mean bits a byte that the source's own probabilities give to `nbytes` drawn bytes.

        The surprises are independent, as each is a rank drawn anew: it falls with the root of `nbytes`.
        """
        second = sum(bits**2 * 2.0**-bits for bits in BITS)
        return math.sqrt((second - self.entropy**2) / nbytes)

    @cached_property
    def permutations(self) -> np.ndarray:
        """`[8^order, 8]` uint8: of each context, its oldest letter first, the letters by falling probability."""
        contexts = len(LETTERS) ** self.order
        keys = np.random.PCG64([self.seed, 0]).random_raw(contexts * len(LETTERS)).reshape(contexts, len(LETTERS))
        return keys.argsort(axis=1, kind="stable").astype(np.uint8)

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces of at most 256 KiB, the first one after a context of `a`s."""
        table, drawn = self.permutations.tobytes(), np.random.PCG64([self.seed, 1])
        contexts, context = len(LETTERS) ** self.order, 0
        for start in range(0, self.nbytes, CHUNK):
            size = min(CHUNK, self.nbytes - start)
            ranks = drawn.random_raw(-(-size // 8)).astype("<u8").tobytes()[:size].translate(_RANKS)
            letters = bytearray(size)
            for at, rank in enumerate(ranks):
                letter = table[context << 3 | rank]
                letters[at] = letter
                context = (context << 3 | letter) % contexts
            yield bytes(letters.translate(_LETTER_OF))
