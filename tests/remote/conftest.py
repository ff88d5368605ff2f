"""The object storage of the tests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from remote_server import BUCKET, SECRETS, ObjectServer, application


@pytest.fixture(scope="session")
def running_server() -> Iterator[ObjectServer]:
    pytest.importorskip("s3fs")
    moto_server = pytest.importorskip("moto.moto_server.werkzeug_app")
    boto3 = pytest.importorskip("boto3")
    serving = pytest.importorskip("werkzeug.serving")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    state: dict[str, ObjectServer] = {}
    app = application(moto_server.DomainDispatcherApplication(moto_server.create_backend_app), state)
    http = serving.make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{http.server_port}"
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
    )

    def mark(request: Any, **_: object) -> None:
        request.headers["X-Direct"] = "1"

    client.meta.events.register("before-send.s3", mark)
    client.create_bucket(Bucket=BUCKET)
    state["server"] = ObjectServer(url, client)
    yield state["server"]
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def server(running_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The server, with credentials that can be recognized in the environment."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    for name, value in zip(names, SECRETS, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running_server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("pqweights.remote.failures.FIRST_WAIT_SECONDS", 0.01)
    running_server.log.clear()
    yield running_server
    running_server.fault = None
    for each in running_server.client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        running_server.client.delete_object(Bucket=BUCKET, Key=each["Key"])
