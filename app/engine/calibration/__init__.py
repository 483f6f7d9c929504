"""Calibration: time steps of the model with synthetic weights before it is loaded."""
