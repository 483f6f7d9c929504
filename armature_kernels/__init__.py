"""Kernels with a plain PyTorch reference for each: linear layers, attention, element-wise operations."""
