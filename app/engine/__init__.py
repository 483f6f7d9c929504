"""Engines that run batched steps on the worker thread."""
