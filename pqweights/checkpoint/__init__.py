"""Checkpoints on disk: headers, files, logical tensors, and the only code that knows stored names."""
