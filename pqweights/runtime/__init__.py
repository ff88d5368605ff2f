"""Computing with results: in transformers, MLX and llama.cpp, generation, and quantized caches of keys and values."""
