"""Benchmarks that run the engine and kernels in this process."""
