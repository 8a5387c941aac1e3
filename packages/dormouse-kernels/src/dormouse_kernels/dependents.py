"""Programmatic dependent launch: a kernel's programs take their places while the kernel before it still drains.

From compute capability 9.0 on. A kernel that is launched so must wait before it touches memory: whatever it reads may
not have been written yet, and whatever it writes may still be read (CUDA programming guide, "Programmatic Dependent
Launch and Synchronization").
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(PDL: tl.constexpr):
    """First statement of a kernel: lets the next kernel's programs in as places fall free, then waits for the last."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
