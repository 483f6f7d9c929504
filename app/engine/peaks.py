"""What the machine could do at the most while it was measured: bytes read a second, and products a second by precision."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import torch

from app.backends.base import Device
from app.hardware.decision import Measurements
from app.kernels.ceilings import ProductCeiling, ReadCeiling
from app.kernels.device_ceilings import COPY_BYTES, FREE_SHARE, CopyCeiling, DeviceProductCeiling

# Of the buffer that the read ceiling is sampled with: four times a large cache, filled in some hundredths of a second.
READ_BYTES = 2**27
PRODUCT_SHAPES = ((256, 2048, 2048),)
# In which dtype a device multiplies what it holds in four bits.
_DEVICE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def of_processor(precisions: Iterable[str], threads: int, cache_bytes: int, part: float = 1.0) -> Measurements:
    """The best of short samples, which no quota stops; of that the `part` that it leaves."""
    torch.set_num_threads(threads)
    with closing(ReadCeiling(threads, max(READ_BYTES, 2 * cache_bytes))) as reading:
        read = reading.sample()
    products: dict[str, float] = {}
    for precision in precisions:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(precision, torch.int8)
        rate = ProductCeiling(dtype, PRODUCT_SHAPES).sample()
        if rate == rate:  # no form multiplies it here: not a number
            products[precision] = part * rate
    return Measurements(read_bytes_per_second=part * read, products_per_second=products)


def of_device(backend: Device, precisions: Iterable[str]) -> Measurements:
    """Bytes that a copy moves, both ways counted: what a kernel that only reads comes near to."""
    size = min(COPY_BYTES, backend.free_bytes() // FREE_SHARE)
    read = CopyCeiling(backend.device, backend.synchronize, size).sample()
    rates: dict[torch.dtype, float] = {}
    products: dict[str, float] = {}
    for precision in precisions:
        dtype = _DEVICE_DTYPES.get(precision, backend.dtype)
        if dtype not in rates:
            rates[dtype] = DeviceProductCeiling(backend.device, backend.synchronize, dtype).sample()
        products[precision] = rates[dtype]
    return Measurements(read_bytes_per_second=read, products_per_second=products)
