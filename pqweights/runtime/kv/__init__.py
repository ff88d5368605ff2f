"""Quantized caches of keys and values: the methods of the literature, and a Cache of transformers that holds them."""
