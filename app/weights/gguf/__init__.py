"""Checkpoints in the format of llama.cpp: one file, or several parts, with metadata, tokenizer and weights."""
