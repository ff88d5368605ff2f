"""Measurements that need the model itself: calibration, sensitivity, the ablation; and how Gaussian its weights are."""
