"""Bad inputs: damaged masters."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from calls import quantize
from column_writer import write_codes
from hostile.case import (
    CONFIG,
    DOWN,
    EXPORT,
    FILE,
    GOOD,
    INDEX,
    INSPECT,
    NORM,
    UP,
    VECTOR,
    VERIFY,
    WEIGHT,
    WEIGHT_DATA,
    Case,
    Content,
    Stored,
    remembered,
    stored,
    write,
)
from restated import restate_hashes

from pqweights.common.options import Options
from pqweights.convert.ready import ReadyWeights
from pqweights.planning.choice import choose_recipe
from pqweights.planning.recipe import load_recipe
from pqweights.targets.master import Learned

SHARD = "model-00001-of-00002.safetensors"
LAST_SHARD = "model-00002-of-00002.safetensors"
ONLY_SHARD = "model-00001-of-00001.safetensors"
Make = Callable[[Path], None]


def run_quantize(source: Path, out: Path, bits: int = 5) -> None:
    quantize(source, out, choose_recipe("q5", Options(bits=bits)), threads=1, max_shard_bytes=300)


def made_of(weights: dict[str, Stored], recipe: str = "q5", **options: Any) -> Make:
    """A function that makes an undamaged master of some weights, a kept vector and a tokenizer."""

    def make(folder: Path) -> None:
        files: dict[str, Content] = {FILE: stored({**weights, NORM: VECTOR}), CONFIG: {"model_type": "llama"}}
        write(folder, {**files, "src/tokenizer.json": {"tokens": []}})
        quantize(folder / "src", folder / "master", load_recipe(recipe), threads=1, **options)
        shutil.rmtree(folder / "src")

    return remembered(make)


def normal(seed: int, *shape: int) -> Stored:
    return "F32", list(shape), np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).tobytes()


GATE = "model.layers.0.mlp.gate_proj.weight"
# Two shards; the second weight has a shape override.
make_master = made_of({UP: WEIGHT, GATE: ("F32", [4, 65], WEIGHT_DATA + bytes(16))}, max_shard_bytes=300)
# A weight of two superblocks, and one of some rows.
make_trellis_master = made_of({UP: normal(17, 900, 128), DOWN: normal(19, 40, 128)}, "t4")


def _made_of_codes(weights: dict[str, Stored], *coded: str, transposed: tuple[str, ...] = ()) -> Callable[[Path], None]:
    """Return what makes a master in which some weights have codes that were ready."""

    def make(folder: Path) -> None:
        write(folder, {FILE: stored(weights | {GATE: WEIGHT, NORM: VECTOR}), CONFIG: {"model_type": "llama"}})
        write_codes(folder / "src", folder / "ready", coded, rate=2.0, transposed=transposed)
        quantize(
            folder / "src",
            folder / "master",
            load_recipe("q5"),
            learned=Learned(ready=ReadyWeights.open(folder / "ready")),
        )
        shutil.rmtree(folder / "src")
        shutil.rmtree(folder / "ready")

    return remembered(make)


def _make_native_master(folder: Path) -> None:
    """A weight of two chunks, and one of one."""
    weights = {UP: normal(23, 90, 800), DOWN: normal(24, 40, 128), NORM: VECTOR}
    write(folder, {FILE: stored(weights), CONFIG: {"model_type": "llama"}})
    options = Options(lossless=True)
    quantize(folder / "src", folder / "master", load_recipe("q5"), options=options)
    shutil.rmtree(folder / "src")


MAKE = {
    "trellis": make_trellis_master,
    # A weight of two strips of two superblocks each, and one of a block.
    "columns": _made_of_codes({UP: normal(21, 130, 800), DOWN: normal(22, 3, 1)}, UP, DOWN),
    # A stack of two such matrices, and a transposed one.
    "stacks": _made_of_codes(
        {UP: normal(25, 2, 130, 800), DOWN: normal(26, 2, 800, 130)}, UP, DOWN, transposed=(DOWN,)
    ),
    "native": remembered(_make_native_master),
}

Damage = Callable[[Path], None]  # damages the folder of a master


def damaged(name: str, damage: Damage, **expected: tuple[str, ...] | None) -> Case:
    """A master that was changed after it was finished.

    name: its first word may be that of a codec in MAKE
    expected: fragments by command, or by `both` those of verify and export; others need not notice
    """

    def prepare(folder: Path) -> None:
        MAKE.get(name.partition("-")[0], make_master)(folder)
        damage(folder / "master")

    commands = {"verify": VERIFY, "inspect": INSPECT, "export": EXPORT}
    both = {"verify": expected.get("both"), "export": expected.get("both")}
    return Case(name, {line: (both | expected).get(key) for key, line in commands.items()}, prepare=prepare)


def placed(master: Path, file: str, tensor: str) -> int:
    """Where the bytes of a tensor begin in its file."""
    data = (master / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin: int = json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]
    return 8 + length + begin


def flip(file: str, tensor: str | None, at: int = 1) -> Damage:
    """Flip one bit of a tensor, or of the header. at: the byte of the tensor"""

    def damage(master: Path) -> None:
        data = bytearray((master / file).read_bytes())
        data[12 if tensor is None else placed(master, file, tensor) + at] ^= 4
        (master / file).write_bytes(data)

    return damage


def edit_json(file: str, path: tuple[str | int, ...], edit: Callable[[Any, str | int], None]) -> Damage:
    """Edit the object or list that holds the last key of a path."""

    def damage(master: Path) -> None:
        place = document = json.loads((master / file).read_bytes())
        for key in path[:-1]:
            place = place[key]
        edit(place, path[-1])
        (master / file).write_text(json.dumps(document, indent=2) + "\n")

    return damage


def set_json(file: str, *path: str | int, to: Any) -> Damage:
    """Replace the value at a path; `to` may also be a function of the old value."""

    def edit(place: Any, key: str | int) -> None:
        place[key] = to(place.get(key)) if callable(to) else to

    return edit_json(file, path, edit)


def remove_key(file: str, *path: str | int) -> Damage:
    return edit_json(file, path, lambda place, key: place.pop(key))


def replace(file: str, content: Content) -> Damage:
    return lambda master: write(master, {file: content})


def cut(file: str, count: int) -> Damage:
    return lambda master: write(master, {file: (master / file).read_bytes()[:-count]})


def delete(file: str) -> Damage:
    return lambda master: (master / file).unlink()


def consistently(file: str, damage: Damage) -> Damage:
    """Damage a file, and make the manifest agree with it."""

    def both(master: Path) -> None:
        damage(master)
        data = (master / file).read_bytes()
        record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        set_json("pqweights.json", "files", file, to=record)(master)

    return both


def without_manifest(damage: Damage) -> Damage:
    """Damage a file of a master whose manifest is lost."""

    def both(master: Path) -> None:
        damage(master)
        (master / MANIFEST).unlink()

    return both


def forged(damage: Damage) -> Damage:
    """Damage tensors, and make their hashes in the manifest agree: only the decoder can notice."""

    def both(master: Path) -> None:
        damage(master)
        restate_hashes(master)

    return both


def overwrite(file: str, tensor: str, at: int, data: bytes) -> Damage:
    """Replace bytes of a tensor. at: the first of them"""

    def damage(master: Path) -> None:
        content, start = bytearray((master / file).read_bytes()), placed(master, file, tensor) + at
        content[start : start + len(data)] = data
        (master / file).write_bytes(content)

    return damage


def restored(change: Callable[[dict[str, Stored]], Any]) -> Damage:
    """Change the stored tensors of the only file, leave its header consistent, and forget the manifest."""

    def damage(master: Path) -> None:
        data = (master / ONLY_SHARD).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        tensors: dict[str, Stored] = {}
        for tensor, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[tensor] = (entry["dtype"], entry["shape"], data[begin:end])
        change(tensors)
        write(master, {ONLY_SHARD: stored(tensors)})
        (master / "pqweights.json").unlink()

    return damage


def shorter(tensors: dict[str, Stored]) -> None:
    """Leave out the last superblock."""
    dtype, (count, stride), data = tensors[UP + "_trellis"]
    tensors[UP + "_trellis"] = (dtype, [count - 1, stride], data[:-stride])


CODEC, CONFIGURED = "hadamard-lloyd-max", "quantization_config"
LEVELS = ("levels", CODEC, "5")
MANIFEST = "pqweights.json"
TRELLIS = UP + "_trellis"


def settings(name: str, *path: str | int, to: Any, export: tuple[str, ...]) -> Case:
    """A changed quantization_config: verify finds another file, and export finds a contradiction."""
    damage, file = (
        set_json("config.json", CONFIGURED, *path, to=to),
        () if name.startswith((*MAKE,)) else ("config.json",),
    )
    return damaged(name, damage, verify=("config.json",), export=(*file, *export))


def settings_in_manifest(name: str, *path: str | int, to: Any, said: tuple[str, ...]) -> Case:
    """A changed quantization_config whose hash in the manifest was changed, too: nothing is decoded by it."""
    damage = consistently("config.json", set_json("config.json", CONFIGURED, *path, to=to))
    return damaged(name, damage, both=("config.json", *said))


def manifest(name: str, *path: str | int, to: Any) -> Case:
    """A manifest that is JSON but makes no sense."""
    return damaged(name, set_json(MANIFEST, *path, to=to), verify=(MANIFEST,), inspect=(MANIFEST,))


CASES = [
    *(
        damaged(name, damage, both=(file, tensor, "blake3_of_pieces"))
        for name, file, tensor, damage in (
            ("master-codes-flipped", SHARD, UP + "_codes", flip(SHARD, UP + "_codes")),
            ("master-norms-flipped", SHARD, UP + "_norms", flip(SHARD, UP + "_norms")),
            ("master-kept-tensor-flipped", LAST_SHARD, NORM, flip(LAST_SHARD, NORM)),
            ("trellis-step-flipped", ONLY_SHARD, TRELLIS, flip(ONLY_SHARD, TRELLIS)),
            ("trellis-stream-flipped", ONLY_SHARD, TRELLIS, flip(ONLY_SHARD, TRELLIS, at=20_000)),
            ("trellis-superblock-flipped", ONLY_SHARD, TRELLIS, flip(ONLY_SHARD, TRELLIS, at=28_800 + 6)),
        )
    ),
    *(
        damaged(name, cut(file, 1), verify=(file, "bytes"), export=(file, "expected", "bytes", "found"))
        for name, file in (("master-shard-truncated", SHARD), ("trellis-cut", ONLY_SHARD))
    ),
    *(
        damaged(
            f"master-norm-{name}",
            forged(overwrite(SHARD, UP + "_norms", at=2, data=pattern)),
            export=(SHARD, UP, "block 1", "its norm is negative or not finite", "the master is damaged"),
        )
        for name, pattern in {
            "nan": b"\x00\x7e",
            "infinite": b"\x00\x7c",
            "negative": b"\x00\xb0",
            "erased": b"\xff\xff",
        }.items()
    ),
    damaged(
        "master-norm-too-large",
        consistently("config.json", set_json("config.json", CONFIGURED, "overrides", GATE, "norm_exponent", to=200)),
        both=("config.json", GATE, "norm_exponent"),
    ),
    damaged(
        "master-norm-too-large-without-a-manifest",
        without_manifest(set_json("config.json", CONFIGURED, "overrides", GATE, "norm_exponent", to=200)),
        export=(GATE, "block 0", "its norm is too large with the exponent 200"),
    ),
    damaged(
        "master-levels-edited-without-a-manifest",
        without_manifest(set_json("config.json", CONFIGURED, *LEVELS, to=lambda old: [*old[:-1], old[-1] + 0.1])),
        export=("config.json", "levels"),
    ),
    settings_in_manifest(
        "trellis-step-power-edited",
        *("overrides", UP),
        to=lambda old: {**(old or {}), "step_power": 0 if (old or {}).get("step_power") else 0.5},
        said=(UP, "step_power"),
    ),
    damaged("master-header-flipped", flip(SHARD, None), verify=(SHARD, "header"), export=(SHARD,)),
    damaged("master-shard-missing", delete(SHARD), verify=(f"{SHARD}: missing",), export=(SHARD, "missing")),
    damaged("master-index-missing", delete(INDEX[4:]), verify=(INDEX[4:], "missing")),
    damaged("master-index-not-json", replace(INDEX[4:], "{"), verify=(INDEX[4:],), export=(INDEX[4:], "JSON")),
    damaged("master-index-edited", set_json(INDEX[4:], "weight_map", NORM, to=SHARD), verify=(INDEX[4:], "sha256")),
    damaged(
        "master-index-edited-with-the-manifest",
        consistently(INDEX[4:], set_json(INDEX[4:], "weight_map", NORM, to=SHARD)),
        verify=(INDEX[4:], "not the index"),
    ),
    damaged(
        "master-index-leaves-the-folder",
        set_json(INDEX[4:], "weight_map", NORM, to="../x.safetensors"),
        verify=(INDEX[4:],),
        export=(INDEX[4:], NORM, "../x.safetensors"),
    ),
    damaged(
        "master-companion-edited", replace("tokenizer.json", '{"tokens": {}}'), verify=("tokenizer.json", "sha256")
    ),
    damaged("master-companion-missing", delete("tokenizer.json"), both=("tokenizer.json", "missing")),
    damaged("master-with-another-file", replace("notes.txt", "mine"), verify=("notes.txt", "not in the manifest")),
    damaged(
        "master-with-another-shard",
        replace("model-00003-of-00003.safetensors", GOOD),
        verify=("model-00003-of-00003.safetensors",),
    ),
    damaged("master-with-a-journal", replace(".pqweights/journal.jsonl", "{}\n"), verify=(".pqweights", "unfinished")),
    damaged(
        "master-config-not-json", replace("config.json", "{"), verify=("config.json",), export=("config.json", "JSON")
    ),
    damaged(
        "master-config-of-no-master-with-the-manifest",
        consistently("config.json", remove_key("config.json", CONFIGURED)),
        verify=("config.json",),
        export=("quant_method",),
    ),
    settings("master-version-99", "format_version", to=99, export=("format_version", "99")),
    settings("master-version-missing", "format_version", to=None, export=("format_version",)),
    settings("master-block-size-64", "block_size", to=64, export=("block_size", "64")),
    settings("master-key-unknown", "bit_order", to="big", export=("'bit_order'",)),
    damaged(
        "master-bits-4",
        set_json("config.json", CONFIGURED, "bits", to=4),
        verify=("config.json",),
        export=("levels", "4 bits"),
    ),
    settings("master-bits-9", "bits", to=9, export=("bits", "found 9")),
    settings("master-codec-unknown", "codec", to="hadamard", export=("'hadamard'", CODEC)),
    settings("master-codec-a-list", "codec", to=[CODEC], export=("codec",)),
    settings("master-rotation-unknown", "rotation", to="givens", export=("'givens'",)),
    settings("master-dtype-unknown", "dtype", to="BF61", export=("dtype", "BF61")),
    settings("master-levels-a-list", "levels", to=[], export=("levels",)),
    settings("master-levels-descending", *LEVELS, to=lambda old: old[::-1], export=("levels",)),
    settings("master-levels-beyond-float32", *LEVELS, to=lambda old: [*old[:-1], 1e300], export=("levels",)),
    settings("master-levels-beyond-float64", *LEVELS, to=lambda old: [*old[:-1], 10**400], export=("levels",)),
    settings("master-override-unknown-key", "overrides", GATE, to={"shape": [4, 65], "bit": 4}, export=(GATE, "'bit'")),
    settings("master-override-unknown-weight", "overrides", "model.absent", to={"bits": 4}, export=("'model.absent'",)),
    settings(
        "master-override-exponent-1000", "overrides", GATE, "norm_exponent", to=1000, export=(GATE, "norm_exponent")
    ),
    damaged(
        "master-override-missing",
        remove_key("config.json", CONFIGURED, "overrides", GATE),
        verify=("config.json",),
        export=None,  # the flattened blocks are read as rows of 128; only verify notices
    ),
    settings_in_manifest("master-levels-edited", *LEVELS, to=lambda o: [*o[:-1], o[-1] + 0.1], said=("levels",)),
    settings_in_manifest("master-shape-edited", "overrides", GATE, "shape", to=[65, 4], said=(GATE, "shape")),
    settings_in_manifest("master-rotation-edited", "rotation", to="signed-hadamard", said=("rotation",)),
    settings_in_manifest("master-dtype-edited", "dtype", to="F16", said=("dtype",)),
    settings_in_manifest("master-kept-edited", "kept", to=[], said=("kept",)),
    damaged("trellis-superblock-missing", restored(shorter), verify=(MANIFEST,), export=(TRELLIS, "expected U8 [2, ")),
    settings("trellis-bits-9", "bits", to=9, export=("config.json", "bits", "from 1.5 to 8", "found 9")),
    settings("trellis-bits-3", "bits", to=3, export=(TRELLIS, "expected U8", "at 3 bits")),
    settings("trellis-rotation-unknown", "rotation", to="givens", export=("config.json", "'givens'")),
    settings("trellis-shape-missing", "overrides", UP, to={}, export=("config.json", UP, "shape")),
    settings("trellis-shape-of-another", "overrides", UP, "shape", to=[128, 128], export=(UP, "[128, 128]")),
    settings("trellis-shape-beyond-memory", "overrides", UP, "shape", to=[10**9, 10**9], export=(UP, "1000000000")),
    settings("trellis-levels", "levels", to={"hadamard-trellis": {"4": [1.0]}}, export=("config.json", "levels")),
    damaged("manifest-absent", delete(MANIFEST), verify=(MANIFEST,), inspect=(MANIFEST,)),
    damaged("manifest-cut", cut(MANIFEST, 10), verify=(MANIFEST, "JSON"), inspect=(MANIFEST, "JSON")),
    damaged("manifest-a-list", replace(MANIFEST, "[]"), verify=(MANIFEST, "list"), inspect=(MANIFEST, "list")),
    damaged("manifest-nested", replace(MANIFEST, "[" * 100_000), verify=(MANIFEST,), inspect=(MANIFEST,)),
    damaged("manifest-without-tensors", remove_key(MANIFEST, "tensors"), verify=(MANIFEST,), inspect=(MANIFEST,)),
    damaged(
        "manifest-without-hashes",
        remove_key(MANIFEST, "tensors", 0, "stored", 0, "blake3_of_pieces"),
        verify=(MANIFEST,),
    ),
    manifest("manifest-version-99", "manifest_version", to=99),
    manifest("manifest-source-null", "source", to=None),
    manifest("manifest-tensor-a-string", "tensors", 0, to="x"),
    manifest("manifest-dtype-unknown", "tensors", 0, "stored", 0, "dtype", to="F128"),
    manifest("manifest-stored-shape-negative", "tensors", 0, "stored", 0, "shape", to=[-2, 128]),
    manifest("manifest-codec-unknown", "tensors", 0, "codec", to="hadamard"),
    manifest("manifest-action-unknown", "tensors", 0, "action", to="dropp"),
    manifest("manifest-shard-size-negative", "max_shard_bytes", to=-5),
    damaged(
        "manifest-leaves-the-folder",
        set_json(MANIFEST, "files", "../x", to={"bytes": 1, "sha256": "0" * 64}),
        verify=(MANIFEST, "'../x'", "outside"),
    ),
    damaged(
        "manifest-absolute-path",
        set_json(MANIFEST, "files", "/x", to={"bytes": 1, "sha256": "0" * 64}),
        verify=(MANIFEST, "'/x'", "outside"),
    ),
    damaged("manifest-without-the-index", remove_key(MANIFEST, "files", INDEX[4:]), verify=(MANIFEST, INDEX[4:])),
    damaged(
        "manifest-of-other-hashes",
        set_json(MANIFEST, "tensors", 0, "stored", 0, "blake3_of_pieces", to="0" * 64),
        verify=("blake3_of_pieces",),
        export=("blake3_of_pieces", "expected " + "0" * 64),
    ),
    damaged(
        "manifest-of-another-name", set_json(MANIFEST, "tensors", 0, "stored", 0, "name", to="x_codes"), verify=(SHARD,)
    ),
    damaged(
        "manifest-tensor-twice",
        set_json(MANIFEST, "tensors", to=lambda old: [*old, old[0]]),
        verify=(MANIFEST, "twice"),
    ),
]
DOWN_192: Stored = ("F32", [8, 192], np.random.default_rng(1).standard_normal(8 * 192).astype(np.float32).tobytes())
