"""Damage that no hash shows: a manifest that states the hashes of what its files hold now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pqweights.checkpoint.digests import digests_of_pieces, hash_of_pieces, parts_of, pieces_of
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import Storage
from pqweights.convert.manifest import read_manifest


def restate_hashes(master: Path) -> Path:
    """Make the manifest of a changed master agree with its files, so that only a decoder can notice the change."""
    manifest, storage = read_manifest(master), Storage(master)
    by_name = {tensor.name: tensor for tensor in open_local(master).stored}

    def digest(name: str) -> str:
        tensor = by_name[name]
        return hash_of_pieces(
            digests_of_pieces(pieces_of(storage, tensor.file, tensor.offset + begin, end - begin))
            for begin, end in parts_of(tensor.byte_count)
        )

    records = tuple(replace(r, digests={name: digest(name) for name in r.digests}) for r in manifest.records)
    (master / "pqweights.json").write_bytes(b"".join(replace(manifest, records=records).to_pieces()))
    return master
