"""Bad inputs: weights that are not finite, and headers of safetensors files."""

from __future__ import annotations

import json

from hostile.case import (
    DOWN,
    GOOD_MAP,
    INFINITY,
    NAN,
    SHARD_2,
    UP,
    WEIGHT_DATA,
    entry,
    headed,
    one_file,
    raw,
    stored,
    two_shards,
    weight_with,
)

WEIGHT_CASES = [
    one_file("nan-in-a-weight", stored({UP: weight_with(NAN, 1, 5)}), UP, "[1, 5]", "NaN"),
    one_file("infinity-in-a-weight", stored({UP: weight_with(INFINITY, 0, 127)}), UP, "[0, 127]", "infinity"),
    one_file("minus-infinity-in-a-weight", stored({UP: weight_with(-INFINITY, 1, 0)}), UP, "[1, 0]", "infinity"),
    one_file(
        "nan-in-a-bf16-weight",
        stored({UP: ("BF16", [3, 128], b"\0\0" * 128 + b"\0\0" * 7 + b"\xc0\x7f" + b"\0\0" * 120 + b"\0\0" * 128)}),
        UP,
        "[1, 7]",
    ),
    two_shards(
        "nan-after-a-finished-shard",
        GOOD_MAP,
        "model-00002-of-00002.safetensors",
        DOWN,
        "[1, 127]",
        files={SHARD_2: stored({DOWN: weight_with(NAN, 1, 127)})},
    ),
]
HEADER_CASES = [
    one_file("empty-file", b"", "0 bytes"),
    one_file("shorter-than-8-bytes", b"\x02\0\0\0\0\0\0", "7 bytes"),
    one_file("header-longer-than-the-file", (1000).to_bytes(8, "little") + b"{}", "header length", "1000"),
    one_file("header-above-100-mb", (100_000_001).to_bytes(8, "little") + b"{}", "at most 100000000", "100000001"),
    one_file("header-length-of-all-ones", b"\xff" * 8 + b"{}", "header length", str(2**64 - 1)),
    one_file("header-not-utf-8", raw(b'{"\xff\xfe": 1}'), "header"),
    one_file("header-not-json", raw('{"a": '), "header", "JSON"),
    one_file("header-of-no-bytes", raw(""), "header", "JSON"),
    one_file("header-a-list", raw("[]"), "header", "list"),
    one_file("header-a-number", raw("1"), "header", "int"),
    one_file("header-nested-100", raw('{"a":' + "[" * 100 + "]" * 100 + "}"), "'a'", "keys and values"),
    one_file("header-nested-900", raw('{"a":' + "[" * 900 + "]" * 900 + "}")),
    one_file("header-nested-960", raw('{"a":' + "[" * 960 + "]" * 960 + "}")),
    one_file("header-nested-100000", raw('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "header"),
    one_file("header-number-of-5000-digits", raw('{"a":' + "9" * 5000 + "}"), "header"),
    one_file(
        "header-key-twice",
        raw(f'{{"{UP}": {json.dumps(entry())}, "{UP}": {json.dumps(entry())}}}', WEIGHT_DATA),
        UP,
        "twice",
    ),
    one_file(
        "entry-key-twice",
        raw('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0\0\0\0"),
        "dtype",
        "twice",
    ),
    one_file("metadata-not-strings", headed({"__metadata__": {"a": 1}, UP: entry()}), "__metadata__"),
    one_file("metadata-a-list", headed({"__metadata__": [], UP: entry()}), "__metadata__"),
    one_file("no-tensors", headed({}, b""), "none"),
    one_file("no-tensors-but-metadata", headed({"__metadata__": {"format": "pt"}}, b""), "none"),
    one_file("entry-a-list", headed({UP: []}), UP),
    one_file("entry-without-a-shape", headed({UP: {"dtype": "F32", "data_offsets": [0, 1024]}}), UP, "shape"),
    one_file("entry-with-another-key", headed({UP: {**entry(), "strides": [1]}}), UP),
    one_file("dtype-unknown", headed({UP: entry("F128")}), UP, "F128"),
    one_file("dtype-a-list", headed({UP: entry(["F32"])}), UP, "dtype"),
    one_file("shape-negative", headed({UP: entry(shape=[-2, -128])}), UP, "shape"),
    one_file("shape-of-floats", headed({UP: entry(shape=[2.0, 128.0])}), UP, "shape"),
    one_file("shape-of-booleans", headed({UP: entry(shape=[True, 256])}), UP, "shape"),
    one_file("shape-of-strings", headed({UP: entry(shape=["2", "128"])}), UP, "shape"),
    one_file("shape-a-number", headed({UP: entry(shape=256)}), UP, "shape"),
    one_file("shape-overflows", headed({UP: entry(shape=[2**40, 2**40])}), UP, "overflows"),
    one_file("shape-overflows-64-bits-to-zero", headed({UP: entry(shape=[2**32, 2**32], offsets=[0, 0])}, b""), UP),
    one_file("shape-overflows-beside-zero", headed({UP: entry(shape=[0, 2**70], offsets=[0, 0])}, b""), UP),
    one_file("shape-too-long-to-print", headed({UP: entry(shape=[1] * 5000)}), UP),
    one_file("half-a-byte", headed({UP: entry("F4", [3], [0, 1])}, b"\0"), UP),
    one_file(
        "offsets-against-the-shape", headed({UP: entry(offsets=[0, 1020])}, WEIGHT_DATA[:1020]), UP, "1024", "1020"
    ),
    one_file("offsets-reversed", headed({UP: entry(offsets=[1024, 0])}), UP),
    one_file("offsets-negative", headed({UP: entry(offsets=[-1024, 0])}), UP, "offsets"),
    one_file("offsets-of-floats", headed({UP: entry(offsets=[0.0, 1024.0])}), UP, "offsets"),
    one_file("offsets-three", headed({UP: entry(offsets=[0, 512, 1024])}), UP, "offsets"),
    one_file("offsets-beyond-the-file", headed({UP: entry(offsets=[2**62, 2**62 + 1024])}), UP, "hole"),
    one_file("tensors-overlap", headed({UP: entry(), DOWN: entry(offsets=[512, 1536])}, bytes(1536)), DOWN, "overlap"),
    one_file("tensors-share-their-bytes", headed({UP: entry(), DOWN: entry()}), "overlap"),
    one_file(
        "hole-between-tensors", headed({UP: entry(), DOWN: entry(offsets=[1032, 2056])}, bytes(2056)), DOWN, "hole"
    ),
    one_file("hole-at-the-start", headed({UP: entry(offsets=[8, 1032])}, bytes(1032)), UP, "hole"),
    one_file("bytes-after-the-data", headed({UP: entry()}, WEIGHT_DATA + b"\0"), "foreign"),
    one_file("truncated-file", headed({UP: entry()}, WEIGHT_DATA[:-1]), "truncated"),
    one_file("name-with-half-a-surrogate", raw('{"\\ud800": ' + json.dumps(entry()) + "}", WEIGHT_DATA), "ud800"),
]
