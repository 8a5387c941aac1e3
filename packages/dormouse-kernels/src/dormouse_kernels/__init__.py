"""Training kernels for mixtures of many small experts: functions of tensors, with references in plain torch."""

from dormouse_kernels import muon, padded, reference, tiles
from dormouse_kernels.counters import Counters
from dormouse_kernels.moe.grouped.op import grouped_mm, grouped_wgrad
from dormouse_kernels.moe.op import glu_experts, latent_glu_experts
from dormouse_kernels.moe.routing import Routing, route
from dormouse_kernels.select import explain

__all__ = [
    "Counters",
    "Routing",
    "explain",
    "glu_experts",
    "grouped_mm",
    "grouped_wgrad",
    "latent_glu_experts",
    "muon",
    "padded",
    "reference",
    "route",
    "tiles",
]
