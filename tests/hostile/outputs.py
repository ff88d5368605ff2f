"""Bad inputs: output folders that may not be replaced or continued; clusters and storage that cannot be meant."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

from hostile.case import EXPORT, GOOD_SRC, INSPECT, QUANTIZE, VERIFY, Case, write
from hostile.masters import run_quantize


def finished_out(folder: Path) -> None:
    """A source, and the finished result of another recipe in OUT."""
    write(folder, GOOD_SRC)
    run_quantize(folder / "src", folder / "out", bits=3)


def symlinked_out(folder: Path) -> None:
    write(folder, GOOD_SRC)
    (folder / "out").symlink_to("src", target_is_directory=True)


def foreign_name(folder: Path) -> None:
    """A companion whose name is not Unicode text, so that no JSON manifest can hold it."""
    write(folder, GOOD_SRC)
    (folder / "src" / b"caf\xe9.txt".decode("utf-8", "surrogateescape")).write_bytes(b"")


def interrupted(folder: Path) -> None:
    """What a run leaves that is interrupted before its first shard is finished."""
    from pqweights.convert.run import Run

    def die(self: Run, *given: object) -> None:
        raise RuntimeError

    write(folder, GOOD_SRC)
    with mock.patch.object(Run, "add", die), contextlib.suppress(RuntimeError):
        run_quantize(folder / "src", folder / "master")


def linked_work_folder(folder: Path) -> None:
    write(folder, GOOD_SRC)
    write(folder, {"mine/notes.txt": "mine", "out/README.md": ""})
    (folder / "out/.pqweights").symlink_to("../mine")


def linked_subfolder(folder: Path) -> None:
    """A result in which a folder that is to be written again is a link to one of the user's."""
    write(folder, {**GOOD_SRC, "src/sub/notice": "a notice", "mine/notice": "mine"})
    run_quantize(folder / "src", folder / "out", bits=3)
    (folder / "out/sub/notice").unlink()
    (folder / "out/sub").rmdir()
    (folder / "out/sub").symlink_to("../mine")


def asked(name: str, options: str, *fragments: str) -> Case:
    """An undamaged source, and wrong options."""
    return Case(name, {f"{QUANTIZE} {options}": fragments}, GOOD_SRC)


UNFINISHED = ("master", "unfinished run of pqweights quantize", "run the same command again")
JOURNAL = "out/.pqweights/journal.jsonl"
CASES = [
    Case("out-holds-something-else", {QUANTIZE: ("out", "'notes.txt'")}, {**GOOD_SRC, "out/notes.txt": "mine"}),
    Case(
        "out-holds-something-else-to-overwrite",
        {QUANTIZE + " --overwrite": ("out", "'notes.txt'")},
        {**GOOD_SRC, "out/notes.txt": "mine"},
    ),
    Case("out-a-file", {QUANTIZE: ("out", "folder")}, {**GOOD_SRC, "out": "mine"}),
    Case("out-below-a-file", {"quantize src file/out": ("file",)}, {**GOOD_SRC, "file": "mine"}),
    Case("out-is-the-source", {"quantize src src": ("src", "must not contain each other")}, GOOD_SRC),
    Case("out-inside-the-source", {"quantize src src/out": ("src/out", "source")}, GOOD_SRC),
    Case(
        "out-around-the-source",
        {"quantize out/src out": ("out/src", "source")},
        {f"out/{name}": content for name, content in GOOD_SRC.items()},
    ),
    Case("out-a-link-to-the-source", {QUANTIZE: ("out", "source")}, prepare=symlinked_out),
    Case("out-with-a-work-folder-elsewhere", {QUANTIZE: ("out/.pqweights", "link")}, prepare=linked_work_folder),
    Case("out-with-a-linked-folder", {QUANTIZE + " --overwrite": ("out/sub", "link")}, prepare=linked_subfolder),
    Case("out-holds-another-result", {QUANTIZE: ("out", "--overwrite")}, prepare=finished_out),
    Case("out-with-a-broken-manifest", {QUANTIZE: ("pqweights.json",)}, {**GOOD_SRC, "out/pqweights.json": "{"}),
    Case(
        "out-with-a-broken-manifest-to-overwrite",
        {QUANTIZE + " --overwrite": ("pqweights.json",)},
        {**GOOD_SRC, "out/pqweights.json": "{"},
    ),
    *(
        Case(f"journal-{name}", {QUANTIZE: ("journal",)}, {**GOOD_SRC, JOURNAL: content, "out/.pqweights/lock": b""})
        for name, content in {
            "empty": b"",
            "of-zeros": bytes(512),
            "a-list": b"[]\n",
            "a-text": b"hello\n",
            "without-its-keys": b"{}\n",
        }.items()
    ),
    Case(
        "folder-of-an-interrupted-run",
        dict.fromkeys(
            (
                VERIFY,
                INSPECT,
                EXPORT,
                "card master",
                "push master me/name --dry-run",
                "plan master",
                "quantize master x",
            ),
            UNFINISHED,
        ),
        prepare=interrupted,
    ),
    asked("include-files-that-match-nothing", "--include-files *.tyop", "*.tyop", "no file"),
    asked("include-files-of-the-weights", "--include-files *.safetensors", "weights"),
    Case("name-of-a-file-not-utf-8", {QUANTIZE: ("caf",)}, prepare=foreign_name),
    asked("bits-out-of-range", "--bits 9", "--bits", "8"),
    asked("bits-nan", "--bits nan", "--bits", "nan"),
    asked("bits-infinite", "--bits inf", "--bits", "inf"),
    asked("bits-no-number", "--bits five", "--bits"),
    asked("bits-a-fraction", "--bits 4.0001", "--bits", "hadamard-trellis has any number"),
    asked("bits-too-few", "--bits 1", "--bits", "found 1"),
    *(
        Case(f"trellis-{name}", {f"{QUANTIZE} --codec hadamard-trellis --bits {bits}": ("1.5 to 8", bits)}, GOOD_SRC)
        for name, bits in {"bits-too-few": "1", "bits-too-many": "9", "bits-nan": "nan"}.items()
    ),
    asked("effort-unknown", "--recipe t4 --effort 7", "--effort", "8, 64 or 256", "7"),
    asked("effort-no-number", "--recipe t4 --effort fast", "--effort", "integer"),
    asked("effort-of-a-codec-without", "--effort 64", "--effort", "no effort setting", "hadamard-trellis has"),
    asked("size-no-size", "--max-shard-size huge", "huge"),
    asked("size-zero", "--max-shard-size 0", "'0'"),
    asked("threads-zero", "--threads 0", "--threads"),
    Case("target-unknown", {"export src out --target bf61": ("bf61",)}, GOOD_SRC),
]
CASES += [
    asked("ray-no-address", "--ray here", "--ray here", "HOST:PORT", "auto", "local"),
    asked("ray-no-port", "--ray 127.0.0.1:", "127.0.0.1:"),
    asked("ray-port-too-large", "--ray 127.0.0.1:65536", "65536"),
    asked("ray-client", "--ray ray://127.0.0.1:10001", "ray://", "node of the cluster"),
    asked("ray-nobody-answers", "--ray 127.0.0.1:1", "127.0.0.1:1"),
    Case("ray-unknown-host", {QUANTIZE + " --ray nobody.invalid:6379": ("nobody.invalid",)}, GOOD_SRC),
    Case("address-unknown-scheme", {"quantize nowhere://bucket/model out": ("nowhere",)}),
    Case("address-without-bucket", {"quantize s3:// out": ("s3://",)}),
    Case("address-with-credentials", {"quantize s3://id:secret@bucket/model out": ("s3://",)}),
    Case("address-of-nothing", {"quantize memory://nothing out": ("memory://nothing",)}),
    Case("address-of-no-master", {"verify memory://nothing": ("memory://nothing",)}),
    Case(
        "address-for-eval",
        {"eval memory://nothing --text eval.txt": ("memory://nothing", "local")},
        {"eval.txt": "text"},
    ),
    Case("output-on-the-hub", {"quantize src hf://org/model": ("hf://org/model", "push")}, GOOD_SRC),
    Case("output-unknown-scheme", {"quantize src nowhere://bucket/out": ("nowhere",)}, GOOD_SRC),
]
