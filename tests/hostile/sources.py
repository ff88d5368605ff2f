"""Bad inputs: folders that are not a checkpoint, and their configuration."""

from __future__ import annotations

from pathlib import Path

from hostile.case import CONFIG, FILE, GOOD, GOOD_SRC, QUANTIZE, UP, WEIGHT, Case, stored, write, zeros
from hostile.masters import make_master


def linked_license(folder: Path) -> None:
    """A file that would be copied, and pushed, is a link to one of the user's."""
    write(folder, GOOD_SRC)
    (folder / "secret").write_text("mine")
    (folder / "src/LICENSE").symlink_to("../secret")


CASES = [
    Case("license-a-link-out-of-the-folder", {QUANTIZE: ("LICENSE", "link")}, prepare=linked_license),
    Case("source-missing", {QUANTIZE: ("src", "no such")}),
    Case("source-an-empty-folder", {QUANTIZE: ("no weights",)}, prepare=lambda folder: (folder / "src").mkdir()),
    Case("source-of-a-config-alone", {QUANTIZE: ("safetensors",)}, {CONFIG: {"model_type": "llama"}}),
    Case(
        "source-a-text-file",
        {"quantize src/notes.txt out": ("notes.txt", "expected a folder, or a safetensors file")},
        {"src/notes.txt": "hello, world"},
    ),
    Case(
        "gguf-folder",
        {QUANTIZE: ("model.gguf", "general.architecture")},
        {"src/model.gguf": b"GGUF\3\0\0\0" + bytes(24), CONFIG: {}},
    ),
    Case(
        "gguf-file",
        {"quantize src/a.gguf out": ("a.gguf", "general.architecture")},
        {"src/a.gguf": b"GGUF\3\0\0\0" + bytes(24)},
    ),
    Case("gguf-renamed", {QUANTIZE: ("GGUF", "model.safetensors")}, {FILE: b"GGUF\3\0\0\0" + bytes(24)}),
    Case("config-nested-300", {QUANTIZE: None}, {FILE: GOOD, CONFIG: '{"a": ' + "[" * 300 + "]" * 300 + "}"}),
    Case("config-nested-100000", {QUANTIZE: ("config.json",)}, {FILE: GOOD, CONFIG: "[" * 100_000}),
    Case(
        "config-with-half-a-surrogate", {QUANTIZE: ("config.json",)}, {FILE: GOOD, CONFIG: '{"bos_token": "\\ud83d"}'}
    ),
    Case(
        "codes-beside-their-weight",
        {QUANTIZE: (UP + "_codes",)},
        {FILE: stored({UP: WEIGHT, UP + "_codes": zeros("U8", 4)})},
    ),
    Case(
        "source-is-a-master", {"quantize master out": ("already a pqweights master",)}, prepare=lambda f: make_master(f)
    ),
    Case(
        "inspect-of-a-source", {"inspect src": ("src", "pqweights.json"), "verify src": ("pqweights.json",)}, GOOD_SRC
    ),
    Case("inspect-of-nothing", {"inspect src": ("src",), "verify src": ("src",), "export src out -t bf16": ("src",)}),
]
