"""Attention for sequences with a KV cache, for whole texts, and over pages."""
