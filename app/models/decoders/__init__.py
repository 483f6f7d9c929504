"""Decoder models: Llama-like and Gemma."""
