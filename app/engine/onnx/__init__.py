"""ONNX Runtime, which computes ONNX files, and exported programs where it is faster."""
