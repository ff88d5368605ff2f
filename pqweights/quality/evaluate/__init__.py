"""Evaluation of models on a text: perplexity, distance from a reference, and speed."""
