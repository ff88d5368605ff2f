"""Measurements: calibration, sensitivity and the ablation, which run the model, and the distribution of its weights."""
