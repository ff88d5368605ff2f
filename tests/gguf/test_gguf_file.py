"""The parser of GGUF files: what it finds in files of the gguf package, and what it says of damaged ones."""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from commands import raises
from tiny_gguf import TYPES, finish, small_gguf

from pqweights.checkpoint.gguf.contents import FILE_TYPES, NUMBER_FORMATS, TENSOR_TYPES, VALUE_TYPES, MetadataList
from pqweights.checkpoint.gguf.file import PIECE_BYTES, is_gguf, open_gguf, parse_gguf
from pqweights.errors import SourceError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def file_of(
    *,
    version: int = 3,
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    counts: Any = None,
) -> bytes:
    """A file with these entries, whether they agree or not. counts: of tensors and keys"""
    tensor_count, key_count = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys) + b"".join(tensors)
    return head + (b"\0" * (-len(head) % 32) if tensors else b"") + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def parse(data: bytes) -> Any:
    return parse_gguf(Path(), "a.gguf", io.BytesIO(data), len(data))


def test_finds_what_the_gguf_package_finds(model: Path) -> None:
    expected, found = gguf.GGUFReader(model), open_gguf(model)
    assert found.version == 3 and found.files == ("model.gguf",) and found.file_bytes == model.stat().st_size
    assert [(t.name, t.type, t.offset, t.byte_count) for t in found.tensors] == [
        (t.name, t.tensor_type.name, int(t.data_offset), int(t.n_bytes)) for t in expected.tensors
    ]
    assert {t.shape for t in found.tensors} == {(3, 32)} and {t.type for t in found.tensors} == set(TYPES)
    for name, field in expected.fields.items():
        if name.startswith("GGUF."):
            continue
        value, contents = found.metadata[name], field.contents()
        if isinstance(value, MetadataList):
            assert value.length == len(contents) and list(value.first) == contents[: len(value.first)]
        else:
            assert value == contents
    assert len(found.metadata) == sum(not name.startswith("GGUF.") for name in expected.fields)


def test_long_lists_are_counted_and_short_ones_kept(model: Path) -> None:
    found = open_gguf(model)
    tokens = found.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, MetadataList)
    assert tokens.item_type == "string"
    assert (tokens.length, len(tokens.first), tokens.first[-1]) == (3000, 1024, "token 1023")
    assert found.metadata["llama.attention.head_count_kv"] == MetadataList("int32", 2, (1, 2))
    assert (found.architecture, found.context, found.vocabulary, found.weights) == ("llama", 64, 3000, 5 * 96)


def test_types_are_those_of_the_gguf_package() -> None:
    known = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {number: TENSOR_TYPES[number] for number in known} == known
    assert {number: name.upper() for number, name in VALUE_TYPES.items()} == {
        int(kind): kind.name for kind in gguf.GGUFValueType
    }
    assert VALUE_TYPES.keys() - NUMBER_FORMATS.keys() == {gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY}
    for number, name in FILE_TYPES.items():
        if number in list(gguf.LlamaFileType):
            assert gguf.LlamaFileType(number).name.partition("_")[2] == name


def test_alignment_and_a_last_tensor_without_padding_are_read() -> None:
    alignment = key("general.alignment", 4, struct.pack("<I", 8))
    data = file_of(keys=[alignment], tensors=[tensor("a", (3,), 0), tensor("b", (3,), 0, 16)], data=bytes(28))
    assert [t.offset % 8 for t in parse(data).tensors] == [0, 0]
    assert len(parse(data + bytes(4)).tensors) == 2
    assert parse(file_of(version=2)).tensors == ()


# Beside those of tests/hostile/gguf.py.
WRONG = {
    "short": (b"GGU", "GGUF 3 bytes"),
    "no-counts": (b"GGUF\3\0\0\0", "number tensors keys 16 8"),
    "version-4": (file_of(version=4), "version 2 3 4"),
    "tensor-count": (file_of(counts=(2**63, 0)), f"tensors {2**63}"),
    "key-count": (file_of(counts=(0, 9), data=bytes(64)), "keys 64 9"),
    "key-length": (file_of(keys=[struct.pack("<Q", 2**60) + bytes(20)]), f"key 0 100000000 {2**60}"),
    "key-cut": (file_of(keys=[struct.pack("<Q", 99) + bytes(20)]), "key 0 99 32 20"),
    "key-empty": (file_of(keys=[key("", 4, bytes(4))]), "key 0 ''"),
    "key-unprintable": (file_of(keys=[key("a\nb", 4, bytes(4))]), "'a\\nb'"),
    "key-not-utf-8": (file_of(keys=[struct.pack("<Q", 1) + b"\xff" + bytes(8)]), r"key 0 UTF-8 b'\xff'"),
    "key-twice": (file_of(keys=[key("a", 4, bytes(4))] * 2), "key 'a'"),
    "value-type": (file_of(keys=[key("a", 13, bytes(4))]), "'a' 12 13"),
    "item-type": (file_of(keys=[key("a", 9, struct.pack("<IQ", 99, 0))]), "'a' 12 99"),
    "list-of-lists": (file_of(keys=[key("a", 9, struct.pack("<IQ", 9, 0))]), "'a' lists"),
    "list-cut": (file_of(keys=[key("a", 9, struct.pack("<IQ", 4, 2**62))]), f"'a' {2**62}"),
    "long-list-cut": (file_of(keys=[key("a", 9, struct.pack("<IQ", 4, 2**62) + bytes(4096))]), f"'a' 4096 {2**62}"),
    "texts-cut": (
        file_of(keys=[key("a", 9, struct.pack("<IQ", 8, 2000) + bytes(8 * 1999))]),
        "'a' 15992 2000",
    ),
    "text-cut": (
        file_of(keys=[key("a", 9, struct.pack("<IQ", 8, 1100) + bytes(8 * 1098) + b"\x10" + bytes(20))]),
        "'a' 16 8841 13",
    ),
    "bool": (file_of(keys=[key("a", 7, b"\2")]), "'a' 2"),
    "alignment-0": (file_of(keys=[key("general.alignment", 4, bytes(4))]), "general.alignment 0"),
    "alignment-48": (file_of(keys=[key("general.alignment", 4, b"\x30\0\0\0")]), "general.alignment 48"),
    "alignment-text": (file_of(keys=[key("general.alignment", 8, text("x"))]), "general.alignment x"),
    "tensor-name-long": (file_of(tensors=[tensor("a" * 128)], data=bytes(128)), "127"),
    "tensor-dimensions": (file_of(tensors=[tensor(shape=(1,) * 6)], data=bytes(32)), "'a' 5 6"),
    "tensor-shape": (file_of(tensors=[tensor(shape=(2**40, 2**40))], data=bytes(32)), f"'a' {2**40}"),
    "tensor-shape-with-0": (file_of(tensors=[tensor(shape=(0, 2**62))], data=bytes(32)), f"'a' {2**62}"),
    "tensor-twice": (file_of(tensors=[tensor(), tensor(offset=128)], data=bytes(256)), "tensor 'a'"),
    "overlap": (file_of(tensors=[tensor(), tensor("b", offset=64)], data=bytes(300)), "'b' 128 64"),
}


class Counted(io.BytesIO):
    """A file that knows how much was read at once."""

    most = 0

    def read(self, count: int | None = -1, /) -> bytes:
        assert count is not None and count >= 0
        self.most = max(self.most, count)
        return super().read(count)


@pytest.mark.parametrize("name", WRONG)
def test_damage_is_named_and_read_in_small_pieces(name: str) -> None:
    data, named = WRONG[name]
    file = Counted(data)
    with raises(SourceError, "a.gguf", *named.split()) as caught:
        parse_gguf(Path(), "a.gguf", file, len(data))
    assert file.most <= PIECE_BYTES
    assert len(str(caught.value)) < 400


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file without a vocabulary, so that a random byte is often one that matters."""
    folder = tmp_path_factory.mktemp("short")
    writer = gguf.GGUFWriter(folder / "a.gguf", "llama")
    writer.add_head_count_kv([1, 2])
    writer.add_causal_attention(True)
    writer.add_token_list(["a", "b"])
    for name in ("a", "b"):
        writer.add_tensor(name, gguf.quants.quantize(gguf.np.ones((2, 32), "f4"), gguf.GGMLQuantizationType.Q4_0),
                          raw_dtype=gguf.GGMLQuantizationType.Q4_0)  # fmt: skip
    finish(writer)
    return (folder / "a.gguf").read_bytes()


def test_every_cut_is_refused(short: bytes) -> None:
    whole = parse(short)
    least = max(t.offset + t.byte_count for t in whole.tensors)
    for count in range(len(short)):
        if count < least:
            with pytest.raises(SourceError):
                parse(short[:count])
        else:
            assert parse(short[:count]).tensors == whole.tensors


# Which files there are.


def test_split_model_is_read_from_any_part_and_from_its_folder(model: Path, tmp_path: Path) -> None:
    small_gguf(tmp_path / "m.gguf", split_max_tensors=2)
    names = tuple(f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    whole = open_gguf(model)
    for path in (tmp_path, *(tmp_path / name for name in names)):
        found = open_gguf(path)
        assert found.files == names and found.path == tmp_path / names[0]
        assert found.file_bytes == sum((tmp_path / name).stat().st_size for name in names)
        assert [t[:3] for t in found.tensors] == [t[:3] for t in whole.tensors]
        assert {t.file for t in found.tensors} == set(names)
        assert found.architecture == "llama"


def test_parts_that_are_missing_or_foreign_are_named(tmp_path: Path) -> None:
    small_gguf(tmp_path / "m.gguf", split_max_tensors=2)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    shutil.copy(second, tmp_path / "alone.gguf")
    with raises(SourceError, "alone.gguf", "3 files"):
        open_gguf(tmp_path / "alone.gguf")
    (tmp_path / "alone.gguf").unlink()
    kept = third.read_bytes()
    third.unlink()
    with raises(SourceError, third, first.name):
        open_gguf(first)
    shutil.copy(second, third)
    with raises(SourceError, third, "2 of 3", "1 of 3"):
        open_gguf(first)
    third.write_bytes(kept[:-64])
    with raises(SourceError, third, "192"):
        open_gguf(second)


def test_folder_needs_one_model(model: Path, tmp_path: Path) -> None:
    assert not is_gguf(tmp_path) and not is_gguf(tmp_path / "nothing.gguf")
    with raises(SourceError, tmp_path):
        open_gguf(tmp_path)
    shutil.copy(model, tmp_path / "a.gguf")
    assert is_gguf(tmp_path) and open_gguf(tmp_path).files == ("a.gguf",)
    shutil.copy(model, tmp_path / "b.gguf")
    with raises(SourceError, "a.gguf, b.gguf", "give the file"):
        open_gguf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not is_gguf(tmp_path)


def test_file_is_known_by_its_name_or_its_first_bytes(model: Path, tmp_path: Path) -> None:
    shutil.copy(model, tmp_path / "blob")
    (tmp_path / "notes.txt").write_text("hello")
    assert is_gguf(tmp_path / "blob") and is_gguf(model) and not is_gguf(tmp_path / "notes.txt")
    assert open_gguf(tmp_path / "blob").files == ("blob",)
