"""Dependent launches (CUDA's programmatic dependent launch): a kernel is launched while the kernel before it still runs.

A kernel that is launched with `launch_options` calls `wait_for_inputs` before it reads or writes what other kernels
write or read. Each of its programs waits, so what waits for it also waits for all kernels before it. Kernels of
libraries begin after all kernels before them, as ever.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_MIN_CAPABILITY = 90  # of Hopper, the first with dependent launches
_MIN_DRIVER = 12_030  # CUDA 12.3, the first that captures them in graphs


@cache
def launch_options() -> dict[str, bool]:
    """Return options of a kernel's launch, and its argument `DEPENDENT`, for the GPU of this process."""
    if triton.knobs.runtime.interpret:
        return {"DEPENDENT": False}
    # A torch without CUDA does not have the function.
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    is_recent = driver is None or driver() >= _MIN_DRIVER
    dependent = is_recent and triton.runtime.driver.active.get_current_target().arch >= _MIN_CAPABILITY
    return {"DEPENDENT": dependent, "launch_pdl": dependent}


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Permit the launch of the next kernel, then wait until all kernels before this one have ended.

    Constants, such as weights, may be read before.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
