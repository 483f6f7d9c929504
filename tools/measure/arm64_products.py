"""Show which library multiplies torch's matrices on 64-bit Arm: `tools/arm64.sh python -m tools.measure.arm64_products`.

oneDNN writes one line for each primitive that it runs (`ONEDNN_VERBOSE=1`), with the implementation: `gemm:acl` and
`acl` are the Arm Compute Library. A product without a line did not go through oneDNN: it ran in torch's BLAS. Emulated,
this shows what is called, never how fast it is.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Mapping

DTYPES = ("float32", "bfloat16", "float16")
ROWS = (1, 8, 64)
_PRODUCT = re.compile(r"primitive,exec,cpu,(?:matmul|inner_product|convolution),([^,]+),")
_MARK = "product "


def main() -> int:
    """Print one line for each product; the exit status is 1 if none was multiplied by the Arm Compute Library."""
    os.environ["ONEDNN_VERBOSE"] = "1"  # read when torch is imported
    with tempfile.TemporaryFile() as file:
        standard_output = os.dup(1)
        os.dup2(file.fileno(), 1)  # oneDNN writes there, in this process: an emulator may not follow another one
        try:
            multiply()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(standard_output, 1)
        file.seek(0)
        found = implementations(file.read().decode())
    for product, implementation in found.items():
        print(f"{product:28} {implementation}")
    return 0 if any("acl" in implementation for implementation in found.values()) else 1


def multiply() -> None:
    """Multiply in each dtype and number of rows; each product is announced before it runs."""
    import torch

    with torch.inference_mode():
        for name in DTYPES:
            weight = torch.randn(512, 256).to(getattr(torch, name))
            for rows in ROWS:
                os.write(1, f"{_MARK}{name} ×{rows}\n".encode())
                torch.nn.functional.linear(torch.randn(rows, 256).to(weight.dtype), weight)
                ctypes.CDLL(None).fflush(None)


def implementations(output: str) -> Mapping[str, str]:
    """Return each announced product with oneDNN's implementation, or `not oneDNN`."""
    found: dict[str, str] = {}
    product = ""
    for line in output.splitlines():
        if line.startswith(_MARK):
            product = line.removeprefix(_MARK)
            found[product] = "not oneDNN"
        elif product and (match := _PRODUCT.search(line)):
            found[product] = f"oneDNN, {match[1]}"
    return found


if __name__ == "__main__":
    sys.exit(main())
