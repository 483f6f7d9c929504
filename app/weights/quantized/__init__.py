"""Weights in safetensors files that other libraries quantized: GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8, MLX."""
