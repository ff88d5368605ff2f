"""Bad inputs: the index of a checkpoint of several files."""

from __future__ import annotations

from hostile.case import CONFIG, DOWN, GOOD_MAP, QUANTIZE, SHARD_1, SHARD_2, UP, WEIGHT, Case, stored, two_shards

INDEX_CASES = [
    two_shards(
        "index-leaves-the-folder",
        {UP: "../x.safetensors"},
        "model.safetensors.index.json",
        UP,
        "../x.safetensors",
        "same folder",
        files={"x.safetensors": stored({UP: WEIGHT})},
    ),
    two_shards(
        "index-absolute-path",
        {UP: "/x.safetensors"},
        "model.safetensors.index.json",
        UP,
        "/x.safetensors",
        "same folder",
    ),
    two_shards("index-windows-path", {UP: "C:\\x.safetensors"}, "model.safetensors.index.json", UP, "same folder"),
    two_shards("index-windows-parent", {UP: "..\\x.safetensors"}, "model.safetensors.index.json", UP, "same folder"),
    two_shards("index-names-a-number", {UP: 1}, "model.safetensors.index.json", UP),
    two_shards("index-names-the-config", {UP: "config.json"}, UP, "config.json", files={CONFIG: {}}),
    two_shards("index-names-a-missing-file", {**GOOD_MAP, "x": "y.safetensors"}, "y.safetensors", "missing"),
    two_shards("index-names-a-missing-tensor", {**GOOD_MAP, "x": GOOD_MAP[UP]}, GOOD_MAP[UP], "'x'"),
    two_shards(
        "index-names-the-wrong-file", {UP: GOOD_MAP[UP], DOWN: GOOD_MAP[UP], "x": GOOD_MAP[DOWN]}, "00001-of-00002"
    ),
    two_shards("index-swaps-files", {UP: GOOD_MAP[DOWN], DOWN: GOOD_MAP[UP]}, UP, GOOD_MAP[UP], GOOD_MAP[DOWN]),
    two_shards("index-without-a-map", None, "model.safetensors.index.json", "weight_map", index={"metadata": {}}),
    two_shards("index-map-empty", {}, "model.safetensors.index.json", "weight_map"),
    two_shards("index-map-a-list", [UP], "model.safetensors.index.json", "weight_map"),
    two_shards("index-a-list", None, "model.safetensors.index.json", "list", index=[]),
    two_shards("index-not-json", None, "model.safetensors.index.json", "JSON", index="{"),
    two_shards("index-not-utf-8", None, "model.safetensors.index.json", "JSON", index=b'{"\xff": 1}'),
    two_shards("index-nested", None, "model.safetensors.index.json", index="[" * 100_000),
    two_shards("truncated-shard", GOOD_MAP, GOOD_MAP[DOWN], "truncated", files={SHARD_2: stored({DOWN: WEIGHT})[:-1]}),
    two_shards(
        "tensor-in-two-shards",
        GOOD_MAP,
        UP,
        GOOD_MAP[UP],
        GOOD_MAP[DOWN],
        "twice",
        files={SHARD_2: stored({UP: WEIGHT, DOWN: WEIGHT})},
    ),
    Case(
        "several-files-without-an-index",
        {QUANTIZE: ("model.safetensors.index.json", "2 safetensors files")},
        {SHARD_1: stored({UP: WEIGHT}), SHARD_2: stored({DOWN: WEIGHT})},
    ),
]
