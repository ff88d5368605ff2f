"""Folding: factors that move between neighbouring layers, so that the model computes the same with better weights."""
