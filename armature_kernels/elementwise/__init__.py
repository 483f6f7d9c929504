"""Norms, rotary embedding, activations and embedding rows."""
