"""Native API: generation from text or token ids, and the tokenizer."""
