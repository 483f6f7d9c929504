"""Measures the peak rates of the machine: bytes read per second, and products per second by precision."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import torch

from app.backends.base import Device
from app.hardware.decision import Measurements
from app.kernels.ceilings import ProductCeiling, ReadCeiling
from app.kernels.device_ceilings import COPY_BYTES, FREE_SHARE, CopyCeiling, DeviceProductCeiling

# Size of the buffer for the read rate: four times a large cache, filled in some hundredths of a second.
READ_BYTES = 2**27
PRODUCT_SHAPES = ((256, 2048, 2048),)
# dtype in which a device multiplies each precision; the backend's dtype for others, such as four bits.
_DEVICE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def of_processor(precisions: Iterable[str], threads: int, cache_bytes: int, part: float = 1.0) -> Measurements:
    """Return the best of short samples that no quota interrupts, times the `part` of the CPU that the quota leaves."""
    torch.set_num_threads(threads)
    with closing(ReadCeiling(threads, max(READ_BYTES, 2 * cache_bytes))) as reading:
        read = reading.sample()
    products: dict[str, float] = {}
    for precision in precisions:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(precision, torch.int8)
        rate = ProductCeiling(dtype, PRODUCT_SHAPES).sample()
        if rate == rate:  # false for NaN: no form multiplies this precision on this machine
            products[precision] = part * rate
    return Measurements(read_bytes_per_second=part * read, products_per_second=products)


def of_device(backend: Device, precisions: Iterable[str]) -> Measurements:
    """Return the rate of a copy, counting reads and writes. A kernel that only reads comes close to it."""
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
