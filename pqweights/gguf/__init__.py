"""GGUF, the file format of llama.cpp: a model in its terms, its files, and what becomes of each weight."""
