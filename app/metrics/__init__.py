"""Prometheus metrics, step log and the observers of the worker thread."""
