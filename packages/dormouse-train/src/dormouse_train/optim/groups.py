"""Which parameter is updated how, decided by its name: every parameter in exactly one group.

Shapes cannot decide it: an embedding is 2-D, and Muon trains it badly without any error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

Method = Literal["factor", "muon", "adamw", "sparse"]


@dataclass(frozen=True)
class Rule:
    """Parameters whose whole name matches one of `patterns` form the group `name`, updated by `method`."""

    name: str
    method: Method
    patterns: tuple[str, ...]
    decays: bool = False
    """Whether weight decay pulls the group towards zero."""

    def claims(self, parameter: str) -> bool:
        """Whether a parameter of this name belongs to the group."""
        return any(re.fullmatch(pattern, parameter) for pattern in self.patterns)


@dataclass(frozen=True)
class Group:
    """A rule and the parameters it claimed, by name, in the model's order."""

    rule: Rule
    parameters: dict[str, nn.Parameter]

    @property
    def numbers(self) -> int:
        """How many numbers the group trains, padding included."""
        return sum(parameter.numel() for parameter in self.parameters.values())


_MIXER = r"block\.(kda|sdpa)\."
_EXPERTS = r"block\.experts\."
_ENGRAM = r"block\.memory\.engram\."

RULES = (
    # Orthonormal factors: the rate is an angle, and decay could only rescale it.
    Rule("factors", "factor", (_EXPERTS + r"(shared\.)?(gate_up_proj|v)",)),
    # An expert that no byte chose must rest, and decay would still move it.
    Rule("experts", "muon", (_EXPERTS + r"(shared_)?swiglu\.(gate_up|down)_proj",)),
    Rule("mixer", "muon", (_MIXER + r"[qkvo]_proj\.weight",), decays=True),
    Rule(
        "dense",
        "muon",
        (
            r"readout\.weight",
            r"block\.memory\.weight",
            _ENGRAM + r"(key|value)\.weight",
            _EXPERTS + r"down\.weight",
        ),
        decays=True,
    ),
    Rule("embedding", "adamw", (r"embedding\.weight", r"iteration_embedding")),
    Rule("head", "adamw", (r"head\.weight",)),
    Rule("tables", "sparse", (_ENGRAM + r"tables",)),
    Rule(
        "gates",
        "adamw",
        (r"block\.controller\.weight", _MIXER + r"(decay|gate)_(down|up)\.weight", _MIXER + r"beta_proj\.weight"),
    ),
    Rule("router", "adamw", (_EXPERTS + r"router\.weight",)),
    Rule("scales", "adamw", (_EXPERTS + r"(shared\.)?scale",)),
    Rule("convolutions", "adamw", (_MIXER + r"[qkv]_conv\.weight", _ENGRAM + r"conv\.weight")),
    Rule(
        "vectors",
        "adamw",
        (
            r"alpha",
            r"(block\.|block\.(kda|sdpa)\.)?norm\.weight",
            _MIXER + r"(A_log|dt_bias|gate_up\.bias)",
            _ENGRAM + r"(query|key|conv)_norm\.weight",
        ),
    ),
)
"""The groups in the order they are printed."""


def assign(parameters: Iterable[tuple[str, nn.Parameter]], rules: tuple[Rule, ...] = RULES) -> list[Group]:
    """Every trainable parameter in exactly one group; groups nothing fell into are left out.

    Errors: `ValueError` that names a parameter which no rule claims, or which two do.
    """
    members: dict[str, dict[str, nn.Parameter]] = {rule.name: {} for rule in rules}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        claims = [rule.name for rule in rules if rule.claims(name)]
        if not claims:
            raise ValueError(f"groups: no rule claims the parameter '{name}'; add its name to one of RULES")
        if len(claims) > 1:
            raise ValueError(
                f"groups: the rules {' and '.join(claims)} both claim '{name}'; narrow one of their patterns"
            )
        members[claims[0]][name] = parameter
    return [Group(rule, members[rule.name]) for rule in rules if members[rule.name]]
