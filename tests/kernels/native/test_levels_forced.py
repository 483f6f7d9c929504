"""`ARMATURE_ISA` from the outside: the level that it names serves a process, or the process says why not and ends before anything runs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from armature_kernels.native.library import native_library
from native_levels import levels

LEVELS = levels()
FOREIGN = "i8mm" if platform.machine() in ("x86_64", "AMD64") else "avx2"
pytestmark = pytest.mark.skipif(not LEVELS, reason=native_library().reason)


def run(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"ARMATURE_ISA": level}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=env)


PRODUCT = """
import sys
import torch
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.native.library import native_library
form, x = IntPanelFactory(4, 32).pack(torch.randn(40, 64), None), torch.randn(3, 64).bfloat16()
torch.testing.assert_close(form.multiply(x).float(), form.multiply_torch(x), rtol=1e-2, atol=1e-2)
print(native_library().level)
"""


@pytest.mark.nightly
def test_a_process_multiplies_at_the_level_that_was_asked_for_or_not_at_all() -> None:
    assert run(LEVELS[-1], "-c", PRODUCT).stdout == f"{LEVELS[-1]}\n"
    refused = run(FOREIGN, "-c", PRODUCT)
    assert refused.returncode == 1, "an exception, no illegal instruction"
    assert f"KernelError: ARMATURE_ISA is {FOREIGN}" in refused.stderr
