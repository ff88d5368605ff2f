"""Where results are made, and where sources are read from: this machine, the Hub, object storage."""

from pqweights.storage.store import Store, open_store

__all__ = ["Store", "open_store"]
