"""LoRA adapters in the layout of peft: checking a directory, and reading its weights."""
