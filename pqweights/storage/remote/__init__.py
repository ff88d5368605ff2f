"""Checkpoints and results in object storage: S3, Google Cloud Storage and whatever else fsspec reads and writes."""
