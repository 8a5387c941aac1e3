"""The expert passes on the `padded` implementation in plain torch: batched products over a buffer of rows an expert."""

from __future__ import annotations

import functools

from dormouse_kernels.moe import op

latent_glu_experts = functools.partial(op.latent_glu_experts, implementation="padded")
"""`dormouse_kernels.latent_glu_experts` with `implementation="padded"`."""

glu_experts = functools.partial(op.glu_experts, implementation="padded")
"""`dormouse_kernels.glu_experts` with `implementation="padded"`."""
