"""pqweights: offline weight quantization. Streams a checkpoint into packed codes and block norms, and out again."""

__version__ = "0.1.0"
