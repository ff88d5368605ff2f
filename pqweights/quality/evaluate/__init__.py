"""Evaluation of models on a text: perplexity, and distance from a reference."""
