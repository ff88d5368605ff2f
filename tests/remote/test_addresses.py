"""Addresses: which texts are some, and what of them is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import raises
from remote_server import address_of

from pqweights.errors import OptionError
from pqweights.storage.addresses import Address, parse_location


@pytest.mark.parametrize("text", ["s3://b/f", "S3://b", "gs://b/a/b", "memory://x", "abfs://c@host/path", "http://x/y"])
def test_addresses_are_recognized(text: str) -> None:
    assert isinstance(parse_location(text), Address)


@pytest.mark.parametrize(
    "text", ["hf://a/b", "org/name", "s3", "s3b/x", "./s3", "/a/b", "file:///a/b", "C:\\x", "", "://x"]
)
def test_other_texts_are_none(text: str) -> None:
    assert not isinstance(parse_location(text), Address)


def test_parts_of_an_address() -> None:
    address = address_of("S3://bucket/a folder/model/")
    assert str(address) == address.url == "s3://bucket/a folder/model"
    assert address.name == "model" and str(address.parent) == "s3://bucket/a folder"
    assert str(address / "x/y.json") == "s3://bucket/a folder/model/x/y.json"
    assert address_of("s3://bucket").name == "bucket" and str(address_of("s3://bucket") / "a") == "s3://bucket/a"
    assert address_of("memory:///x").url == "memory://x" or address_of("memory:///x").path == "x"


def test_credentials_and_queries_are_not_shown() -> None:
    address = address_of("sftp://user:hidden@host/models/one?key=hidden")
    assert "hidden" in address.url and "hidden" in (address / "x").url
    for shown in (str(address), repr(address), str(address / "x"), str(address.parent), f"{[address]}"):
        assert "hidden" not in shown and "host" in shown
    with raises(OptionError, "credentials") as raised:
        address_of("s3://key:hidden@bucket/model")
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///x", "s3://b/a//c", "s3://b/../c", "gs://b/./c", "s3://b/a\nb", "memory://"]
)
def test_addresses_of_nothing_are_refused(text: str) -> None:
    with raises(OptionError, "://BUCKET/FOLDER"):
        address_of(text)


def test_file_addresses_are_local_paths() -> None:
    for text, path in {"file:///a/b%20c": "/a/b c", "file://localhost/a": "/a", "a": "a", "a/b/c": "a/b/c"}.items():
        assert parse_location(text) == Path(path)
    with raises(OptionError, "file://other/a"):
        parse_location("file://other/a")


@pytest.mark.parametrize("text", ["s3:/b/c", "S3:/b", "hf:/ORG/NAME", "https:/huggingface.co/ORG/NAME"])
def test_addresses_that_lost_a_slash_are_refused_as_texts_and_as_paths(text: str) -> None:
    for given in (text, Path(text)):
        with raises(OptionError, text, "two slashes"):
            parse_location(given)
    for path in (Path("gs1/x"), Path("s3b"), Path("hf/x")):  # folders whose names begin alike
        assert parse_location(path) == path
