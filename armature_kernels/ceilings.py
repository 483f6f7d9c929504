"""Measured hardware peaks of this machine and of its device: bytes per second, and operations per second by dtype.

The host's memory is read by `memchr` and `memcmp` of the C library (vectorised everywhere, no compiler needed) and by
a function of the native library. The fastest counts. ctypes releases the GIL, so threads read in parallel;
On a device with separate memory, several
operations are queued before the host waits, so that launch overhead does not count.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

from armature_kernels.linear.activations import quantize
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.linear.linear import FORMS, host_architecture
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import allocate_weights

BUFFER_BYTES = 2**29  # much larger than any cache
ABSENT_BYTE = 7  # a byte that the buffer does not hold
REPEATS = 3  # passes per sample, of which the best counts: a peak is the rate that can be reached
# libgomp's threads spin for some milliseconds after a product and would compete with the readers for the cores.
SPIN_DOWN_SECONDS = 0.05
ProductShape = tuple[int, int, int]
Multiply = Callable[[torch.Tensor], object]
# (rows, outputs, inputs): the best shape differs between machines, so all are tried
PRODUCT_SHAPES = ((256, 2048, 2048), (512, 8192, 2048), (512, 2048, 8192), (1024, 4096, 2048))


class ReadBandwidthProbe:
    """Measures the bytes per second that `threads` threads together read from memory."""

    def __init__(self, threads: int, num_bytes: int | None = None) -> None:
        num_bytes = BUFFER_BYTES if num_bytes is None else num_bytes
        self._library = ctypes.CDLL(None)
        self._library.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._library.memchr.restype = ctypes.c_void_p
        self._library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        # Written, so that every page is backed by separate memory. On small pages a gigabyte, which is twice the cache
        # that some guests see, takes two seconds.
        self._buffer = allocate_weights(num_bytes).fill_(1)
        self._pool = ThreadPoolExecutor(threads)
        self.share = num_bytes // threads // 2 * 2
        self.parts = [self._buffer.data_ptr() + index * self.share for index in range(threads)]

    def sample(self) -> float:
        """Return the best rate of all readers over a few passes."""
        time.sleep(SPIN_DOWN_SECONDS)
        readers = (self._search, self._compare, *((self._prefetch,) if native_library().library is not None else ()))
        return max(self._rate(reader) for _ in range(REPEATS) for reader in readers)

    def close(self) -> None:
        """Stop the reader threads."""
        self._pool.shutdown()

    def _rate(self, reader: Callable[[int], None]) -> float:
        start = time.perf_counter()
        for _ in self._pool.map(reader, self.parts):
            pass
        return self.share * len(self.parts) / (time.perf_counter() - start)

    def _search(self, address: int) -> None:
        """Search for a byte that the buffer does not contain."""
        found = self._library.memchr(address, ABSENT_BYTE, self.share)
        assert found is None, "the buffer contains only ones"

    def _prefetch(self, address: int) -> None:
        """Read with the native library's function, which prefetches like its products do."""
        library = native_library().library
        assert library is not None, "sample() checks that the library is loaded"
        library.armature_read(address, self.share)

    def _compare(self, address: int) -> None:
        """Compare the two halves of the share, which are equal."""
        difference = self._library.memcmp(address, address + self.share // 2, self.share // 2)
        assert difference == 0, "the buffer contains only ones"


def is_faster_in_four_bits() -> bool:
    """Return True if the native products of 4-bit weights do more operations per second than those of 8-bit weights.

    Without VNNI, AVX2 sums eight products of four bits in 16 bits, and one of eight bits: 290 against 188 GOP/s on two
    cores of Zen 2.
    """
    return native_library().level == "avx2"


class MatmulThroughputProbe:
    """Measures the operations per second of the fastest product among forms and shapes.

    A multiply-add counts as two operations. Weights of integer products have at least `bits` bits.
    """

    def __init__(self, dtype: torch.dtype, shapes: Iterable[ProductShape] | None = None, bits: int = 4) -> None:
        candidates = [
            (shape, multiply, x) for shape in shapes or PRODUCT_SHAPES for multiply, x in _products(dtype, bits, *shape)
        ]
        for _, multiply, x in candidates:
            multiply(x)  # the first call of a shape compiles its code
        candidates.sort(key=lambda candidate: -max(self._rate(*candidate) for _ in range(REPEATS)))
        self._best = candidates[:2]  # keep the second best too: it may be the best in a later sample

    def sample(self) -> float:
        """Return the best rate over a few repeats; NaN if no product is available."""
        return max((self._rate(*candidate) for _ in range(REPEATS) for candidate in self._best), default=math.nan)

    def _rate(self, shape: ProductShape, multiply: Multiply, x: torch.Tensor) -> float:
        rows, outputs, inputs = shape
        start = time.perf_counter()
        multiply(x)
        return 2.0 * rows * outputs * inputs / (time.perf_counter() - start)


def _products(
    dtype: torch.dtype, bits: int, rows: int, outputs: int, inputs: int
) -> Iterable[tuple[Multiply, torch.Tensor]]:
    """Yield a product with a random weight for every form that supports it, with its input."""
    if dtype == torch.int8:
        yield from _integer_products(rows, outputs, inputs)
        if bits == 4 and is_faster_in_four_bits():
            yield _rounded_before(_four_bits(outputs, inputs), rows)
        return
    x = torch.randn(rows, inputs).to(dtype)
    for name in ("plain", "onednn", "panels", "panels/widened", "panels/fp32"):
        packing = FORMS[name]
        if packing.supports(outputs, inputs, dtype):
            yield packing.pack(torch.randn(outputs, inputs).to(dtype), None).multiply, x


def _integer_products(rows: int, outputs: int, inputs: int) -> Iterable[tuple[Multiply, torch.Tensor]]:
    """Yield oneDNN's int8 product, if this torch has it, and the native one.

    oneDNN gets unsigned activations, because signed ones use a slow reference implementation
    (docs/performance.md). So does every product on x86 without VNNI: it took seconds for 256 x 2048 x 2048 on Zen 3.
    """
    if hasattr(torch.ops.onednn, "qlinear_pointwise") and (
        host_architecture() != "x86_64" or native_library().level in _VNNI_LEVELS
    ):
        weight = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), None)
        scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
                x, 1.0, 128, weight, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
            )
            return product

        yield multiply, torch.randint(0, 256, (rows, inputs), dtype=torch.uint8)
    packing = IntPanelFactory(bits=8, group=None)
    if packing.supports(outputs, inputs, torch.bfloat16):
        yield _rounded_before(packing.pack(torch.randn(outputs, inputs), None), rows)


def _rounded_before(form: IntPanelLinear, rows: int) -> tuple[Multiply, torch.Tensor]:
    """Return the product of rows that are quantized before it, as those of a model are by the operation before."""
    x = torch.randn(rows, form.inputs).bfloat16()
    codes = quantize(x, form.row_groups)
    return lambda _: form.multiply(codes), x


def _four_bits(outputs: int, inputs: int) -> IntPanelLinear:
    """Return a weight of random codes in the served form. To round values to four bits would take a second."""
    form = IntPanelFactory(bits=4, group=32, double_quantized=True).empty_form(outputs, inputs, None)
    codes = torch.randint(0, 16, (outputs, form.padded), dtype=torch.uint8)
    scales = torch.ones(outputs, form.padded // 32, dtype=torch.int8)
    form.fill_codes(0, codes, scales, torch.ones(outputs, 1, dtype=torch.bfloat16))
    return form


_VNNI_LEVELS = ("amx", "avx512bf16", "avx512", "avxvnni")
COPY_BYTES = 2**30  # much larger than any cache
FREE_MEMORY_FRACTION = 8  # at most this fraction (1 / FREE_MEMORY_FRACTION) of the device's free memory is copied
DEVICE_REPEATS = 3  # the best counts: a peak is the rate that can be reached
QUEUE_DEPTH = 8  # copies, or products, that are queued before one wait
MIN_PRODUCT_SIZE, MAX_PRODUCT_SIZE = 1024, 8192  # rows, outputs and inputs of a product
_LONG_SECONDS = 0.002  # a product that takes this long keeps the device busy by itself
_OTHER_CACHE_BYTES = 64 * 2**20  # an Apple chip's last level has 8 to 96 MiB

Synchronize = Callable[[], None]


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's largest cache; weights must be larger for their reads to reach memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _OTHER_CACHE_BYTES


class CopyBandwidthProbe:
    """Measures the bytes per second that are read and written when one half of a buffer is copied to the other."""

    def __init__(self, device: torch.device, synchronize: Synchronize, num_bytes: int = COPY_BYTES) -> None:
        self._source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)
        self._synchronize = synchronize

    def sample(self) -> float:
        """Return the best of a few repeats; each byte counts once as read and once as written."""
        moved = 2 * self._source.numel() * QUEUE_DEPTH
        return max(moved / self._seconds() for _ in range(DEVICE_REPEATS))

    def _seconds(self) -> float:
        return _timed(lambda: self._target.copy_(self._source), self._synchronize)


class DeviceMatmulThroughputProbe:
    """Measures the operations per second of torch's product in `dtype`; a multiply-add counts as two.

    The size grows until one product keeps the device busy. A small device would need seconds for the largest size.
    """

    def __init__(self, device: torch.device, synchronize: Synchronize, dtype: torch.dtype) -> None:
        self._device, self._synchronize, self._dtype = device, synchronize, dtype
        self.size = MIN_PRODUCT_SIZE
        while self.size < MAX_PRODUCT_SIZE and self._seconds(self.size) / QUEUE_DEPTH < _LONG_SECONDS:
            self.size *= 2

    def sample(self) -> float:
        """Return the best rate of a few repeats."""
        return 2.0 * self.size**3 * QUEUE_DEPTH / min(self._seconds(self.size) for _ in range(DEVICE_REPEATS))

    def _seconds(self, size: int) -> float:
        """Time the product of this size, after one untimed product in which torch selects its kernel."""
        x, weight = (torch.full((size, size), 0.01, dtype=self._dtype, device=self._device) for _ in range(2))
        F.linear(x, weight)
        return _timed(lambda: F.linear(x, weight), self._synchronize)


def _timed(work: Callable[[], object], synchronize: Synchronize) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(QUEUE_DEPTH):
        work()
    synchronize()
    return time.perf_counter() - start
