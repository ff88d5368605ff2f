"""Measuring: what calibration needs to know of a model, perplexity and divergence, and their figures."""
