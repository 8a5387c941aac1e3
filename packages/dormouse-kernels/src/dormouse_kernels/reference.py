"""The expert passes on the `reference` implementation, the definition in plain torch: one product an expert."""

from __future__ import annotations

import functools

from dormouse_kernels.moe import op

latent_glu_experts = functools.partial(op.latent_glu_experts, implementation="reference")
"""`dormouse_kernels.latent_glu_experts` with `implementation="reference"`."""

glu_experts = functools.partial(op.glu_experts, implementation="reference")
"""`dormouse_kernels.glu_experts` with `implementation="reference"`."""
