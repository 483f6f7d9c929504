"""Linear layers: packed weight formats, quantization and matrix products."""
