"""Grouped products for any mixture of experts: `grouped_mm`, `grouped_wgrad` and SwiGLU experts, in Triton."""
