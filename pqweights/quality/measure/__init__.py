"""Measurements: calibration and sensitivity, which run the model, and the distribution of its weights."""
