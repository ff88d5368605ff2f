"""The server of the tests stores what clients of S3 send, and its proxy does what tests ask of it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from loopback_faults import Action, Cut, Drop, Fault, Short, Stall
from object_server import SECRETS, ObjectStore, refusal

boto3 = pytest.importorskip("boto3")
config = pytest.importorskip("botocore.config")
exceptions = pytest.importorskip("botocore.exceptions")

CONTENT = bytes(range(256)) * 512


@pytest.fixture
def client(object_server: ObjectStore) -> Any:
    options = config.Config(retries={"total_max_attempts": 1}, read_timeout=0.5, connect_timeout=5)
    return boto3.client("s3", config=options)


def put(client: Any, store: ObjectStore, key: str = "key", content: bytes = CONTENT) -> None:
    client.put_object(Bucket=store.bucket, Key=key, Body=content)


def test_objects_are_stored_and_requests_are_logged(object_server, client):
    put(client, object_server, "a b")
    part = client.get_object(Bucket=object_server.bucket, Key="a b", Range="bytes=5-9")["Body"].read()
    assert (object_server.read("a b"), part) == (CONTENT, CONTENT[5:10])
    assert object_server.sizes() == {"a b": len(CONTENT)}
    (written,) = object_server.proxy.requests("PUT", "a%20b$")
    assert (written.number, written.status, written.received) == (0, 200, len(CONTENT))
    (read,) = object_server.proxy.requests("GET")
    assert (read.range, read.status, read.sent) == ("bytes=5-9", 206, 5)


def test_every_bucket_is_empty(object_server):
    assert object_server.sizes() == {}
    assert object_server.proxy.log == []


def test_credentials_are_in_the_environment(object_server):
    assert set(SECRETS) <= set(os.environ.values())


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (403, "AccessDenied")])
def test_refusals_reach_the_client_and_not_the_server(object_server, client, status, code):
    object_server.proxy.inject(Fault(refusal(status, code), "PUT"))
    with pytest.raises(exceptions.ClientError, match=code):
        put(client, object_server)
    assert object_server.sizes() == {}
    put(client, object_server)
    assert [each.status for each in object_server.proxy.log] == [status, 200]


@pytest.mark.parametrize("reset", [False, True])
def test_uploads_and_replies_are_cut(object_server, client, reset):
    object_server.proxy.inject(Fault(Cut(1000, reset)), Fault(Cut(1000, reset), "GET"))
    with pytest.raises(exceptions.ConnectionClosedError):
        put(client, object_server)
    assert object_server.sizes() == {}
    put(client, object_server)
    # A client that sees RST may lose what came before it.
    body = client.get_object(Bucket=object_server.bucket, Key="key")["Body"]
    with pytest.raises(exceptions.HTTPClientError):
        body.read()
    cut, whole, reply = object_server.proxy.log
    assert (cut.status, cut.received, whole.received, reply.sent) == (0, 1000, len(CONTENT), 1000)


@pytest.mark.parametrize(("applied", "stored"), [(False, {}), (True, {"key": len(CONTENT)})])
def test_lost_replies_may_leave_the_object(object_server, client, applied, stored):
    object_server.proxy.inject(Fault(Drop(applied)))
    with pytest.raises(exceptions.ConnectionClosedError):
        put(client, object_server)
    assert object_server.sizes() == stored


@pytest.mark.parametrize("action", [Stall(1), Stall(1, at=100)])
def test_slow_replies_run_into_the_time_limit_of_the_client(object_server, client, action: Action):
    put(client, object_server)
    object_server.proxy.inject(Fault(action, "GET"))
    with pytest.raises(exceptions.ReadTimeoutError):
        client.get_object(Bucket=object_server.bucket, Key="key")["Body"].read()


def test_short_replies_look_complete(object_server, client):
    put(client, object_server)
    object_server.proxy.inject(Fault(Short(10), "GET"))
    assert client.get_object(Bucket=object_server.bucket, Key="key", Range="bytes=0-99")["Body"].read() == CONTENT[:10]


def test_faults_hit_single_parts_of_an_upload(object_server, client):
    named = {"Bucket": object_server.bucket, "Key": "large"}
    upload = client.create_multipart_upload(**named)["UploadId"]
    object_server.proxy.inject(Fault(refusal(503, "SlowDown"), "PUT", "partNumber=2"))
    first = client.upload_part(**named, UploadId=upload, PartNumber=1, Body=CONTENT)
    with pytest.raises(exceptions.ClientError, match="SlowDown"):
        client.upload_part(**named, UploadId=upload, PartNumber=2, Body=CONTENT)
    assert (first["ResponseMetadata"]["HTTPStatusCode"], object_server.uploads()) == (200, ["large"])
    client.abort_multipart_upload(**named, UploadId=upload)
    assert object_server.uploads() == []
