"""The Hub behind one door: every request, how long is waited, and the words in which a refusal is told.

The official client (huggingface_hub 2.4) tries few requests again, checks no hash of what it fetched, and starts a
file from the beginning where a process was killed. So this is done here: lost connections, replies cut short, 429 with
Retry-After and errors of the server are tried again, content is checked against the hash that the Hub lists, and large
files are fetched by ranges. All refusals become HubError, one line without the token.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pqweights.checkpoint.storage import Origin
from pqweights.checkpoint.writer import COPY_BYTES, disk_errors, partial_path, sync_folder
from pqweights.errors import HubError

ATTEMPTS = 6
FIRST_ATTEMPTS = 3  # as long as there was no answer to anything
FIRST_WAIT_SECONDS = 1.0  # then twice as long each time
LONGEST_WAIT_SECONDS = 120.0  # asked for by the Hub; longer than that is for the user to wait
WRONG_CONTENT_ATTEMPTS = 3  # a file that does not hash to what the Hub says
TIMEOUT_SECONDS = 30.0
COMMIT_TIMEOUT_SECONDS = 300.0
PASSING = (408, 425, 429, 500, 502, 503, 504)
LOG_IN = "log in with `hf auth login`, or pass --token"
TOKEN = re.compile(r"hf_[A-Za-z0-9]{4,}")
# Of a URL, everything from the question mark on: signatures stand there.
QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")

Result = TypeVar("Result")
Tell = Callable[[str], None]  # a line for the user: what is being waited for
Show = Callable[[int], None]  # so many more bytes have come, or gone


class Interrupted(Exception):
    """A transfer was stopped by this program, because something else failed or the user asked for it."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. sha256: of its content where it is kept as a large file, else blob_id, its git SHA-1."""

    name: str
    byte_count: int
    sha256: str | None
    blob_id: str | None

    @property
    def identity(self) -> str:
        """What its content hashes to."""
        return self.sha256 or self.blob_id or ""

    def is_of(self, pieces: Iterable[bytes]) -> bool:
        """Whether this is its content."""
        digest = hashlib.sha256() if self.sha256 is not None else hashlib.sha1(usedforsecurity=False)
        if self.sha256 is None:
            digest.update(b"blob %d\0" % self.byte_count)
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest() == self.identity


@dataclass(frozen=True)
class Repository:
    """A repository at one commit; every request names that commit, so that later ones change nothing."""

    id: str
    commit: str
    files: dict[str, RemoteFile]

    @property
    def origin(self) -> Origin:
        """Id and commit."""
        return Origin(self.id, self.commit)


class Hub:
    """Requests with one token. requests, bytes: how many were sent, and what came back, so far.

    token: None for the one that the user logged in with, or that HF_TOKEN names. tell: hears of every wait.
    """

    def __init__(self, token: str | None = None, tell: Tell = lambda line: None) -> None:
        # Imported here: most commands never need it, and it takes half as long as they do.
        self.library: Any = importlib.import_module("huggingface_hub")
        self._http: Any = importlib.import_module("httpx2")
        self.utils: Any = importlib.import_module("huggingface_hub.utils")
        self.errors: Any = importlib.import_module("huggingface_hub.errors")
        # Its warnings repeat what `tell` says.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        self.utils.disable_progress_bars()
        self.token = token
        self.api: Any = self.library.HfApi(token=token)
        self.requests = self.bytes = 0
        self._tell = tell
        self._counted: Any = None
        self._lock = threading.Lock()

    def repository(self, repository: str, revision: str | None = None) -> Repository:
        """What a repository holds at a branch, tag or commit (None: main).

        Raises HubError.
        """
        try:
            self.utils.validate_repo_id(repository)
        except self.errors.HFValidationError as error:
            raise HubError(f"{repository}: no name of a repository: {self.clean(str(error))}") from None
        found = self.call(
            repository,
            lambda: self.api.model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS),
            f" at revision {revision}" if revision else "",
        )
        files = {}
        for each in found.siblings or ():
            sha256 = None if each.lfs is None else each.lfs.sha256
            if each.size is None or (sha256 is None and each.blob_id is None):
                raise HubError(f"{repository}: {each.rfilename!a}: the Hub tells neither size nor hash of it")
            files[each.rfilename] = RemoteFile(each.rfilename, each.size, sha256, each.blob_id)
        if not found.sha:
            raise HubError(f"{repository}: the Hub tells no commit of it")
        return Repository(repository, found.sha, dict(sorted(files.items())))

    @property
    def endpoint(self) -> str:
        """Address of the Hub that is asked."""
        return self.clean(str(self.api.endpoint))

    def log_in(self) -> str:
        """The name that the token stands for.

        Raises HubError where there is none, or not a valid one.
        """
        return str(self.call("login", lambda: self.api.whoami())["name"])

    def exists(self, repository: str) -> bool:
        """Whether there is a repository that we may see. Raises HubError."""
        return bool(self.call(repository, lambda: self.api.repo_exists(repository)))

    def read(self, repository: Repository, file: str, start: int, count: int) -> bytes:
        """`count` bytes of a file from `start`, by one ranged request. Raises HubError."""
        if count == 0:
            return b""

        def fetch() -> bytes:
            data = bytearray()
            for chunk in self._stream(repository, file, start, count):
                data += chunk
                if len(data) > count:
                    raise HubError(f"{repository.id}: {file}: asked for {count} bytes, the Hub sends more")
            if len(data) != count:
                raise self._http.RemoteProtocolError(f"expected {count} bytes, found {len(data)}")
            return bytes(data)

        return self.call(repository.id, fetch, f": {file}")

    def read_whole(self, repository: Repository, file: RemoteFile) -> bytes:
        """A small file, checked against its hash. Raises HubError."""
        for _ in range(WRONG_CONTENT_ATTEMPTS):
            data = self.read(repository, file.name, 0, file.byte_count)
            if file.is_of([data]):
                return data
        raise _wrong_content(repository, file)

    def download(
        self,
        repository: Repository,
        file: RemoteFile,
        target: Path,
        show: Show = lambda count: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fetch a file to `target`, going on where an earlier attempt or process stopped; checked against its hash.

        Raises HubError, OutputError for the disk, Interrupted once `stop` says so.
        """
        partial = partial_path(target)

        def fetch() -> None:
            with disk_errors(target), open(partial, "ab") as stream:
                if stream.tell() > file.byte_count:
                    stream.truncate(0)
                for chunk in self._stream(repository, file.name, stream.tell(), file.byte_count - stream.tell()):
                    if stop():
                        raise Interrupted
                    stream.write(chunk)
                    show(len(chunk))
                stream.flush()
                if stream.tell() != file.byte_count:
                    raise self._http.RemoteProtocolError(f"expected {file.byte_count} bytes, found {stream.tell()}")
                os.fsync(stream.fileno())

        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(WRONG_CONTENT_ATTEMPTS):
            self.call(
                repository.id, fetch, f": {file.name}", stop,
                how_far=lambda: partial.stat().st_size if partial.exists() else 0,
            )  # fmt: skip
            if file.is_of(pieces_of(partial)):
                with disk_errors(target):
                    os.replace(partial, target)
                    sync_folder(target.parent)
                return
            partial.unlink()
        raise _wrong_content(repository, file)

    def cached(self, repository: Repository, file: RemoteFile) -> Path | None:
        """A file in the cache that all users of the Hub's client share, where it is there and whole."""
        found = self.library.try_to_load_from_cache(repository.id, file.name, revision=repository.commit)
        path = Path(found) if isinstance(found, str) else None
        return path if path is not None and path.is_file() and path.stat().st_size == file.byte_count else None

    def download_to_cache(
        self,
        repository: Repository,
        file: RemoteFile,
        show: Show = lambda count: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Fetch a file into that cache, unless it is there; checked against its hash. Raises HubError, Interrupted."""

        class Meter(self.utils.tqdm):  # type: ignore[name-defined,misc]
            """Where the client tells how far it is; nothing is shown here."""

            def __init__(self, *values: Any, **options: Any) -> None:
                super().__init__(*values, **(options | {"disable": True}))

            def update(self, n: float | None = 1) -> None:
                if stop():
                    raise Interrupted
                show(int(n or 0))

        def fetch() -> Path:
            return Path(
                self.library.hf_hub_download(
                    repository.id, file.name, revision=repository.commit, token=self.token, tqdm_class=Meter
                )
            )

        for _ in range(WRONG_CONTENT_ATTEMPTS):
            path = self.call(repository.id, fetch, f": {file.name}", stop)
            if file.is_of(pieces_of(path)):
                return path
            path.resolve().unlink(missing_ok=True)  # the blob; the client would take it again
            path.unlink(missing_ok=True)
        raise _wrong_content(repository, file)

    def upload(self, repository: Repository, branch: str, name: str, content: str | bytes, create_pr: bool) -> Any:
        """The operation that adds a file to a commit, its content sent already if it is a large file. content: path, or bytes.

        Raises HubError.
        """

        def send() -> Any:
            addition = self.library.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
            try:
                self.api.preupload_lfs_files(repository.id, additions=[addition], revision=branch, create_pr=create_pr)
            except RuntimeError as error:  # the client's, around what went wrong
                if isinstance(error.__cause__, self._http.HTTPError | OSError):
                    raise error.__cause__ from None
                raise
            return addition

        return self.call(repository.id, send, f": {name}", attempts=1)  # the client tries six times by itself

    def call(
        self,
        repository: str,
        request: Callable[[], Result],
        of: str = "",
        stop: Callable[[], bool] = lambda: False,
        attempts: int | None = None,
        how_far: Callable[[], int] = lambda: 0,
    ) -> Result:
        """The result of a request, tried again where that may help. of: what it is about, after the repository's name.

        attempts: at most so many; by default fewer as long as the Hub was never reached. how_far: they are counted anew when
        this grows.

        Raises HubError, Interrupted.
        """
        what, wait = repository + of, FIRST_WAIT_SECONDS
        attempt, reached = 0, how_far()
        while True:
            self._count()
            try:
                return request()
            except (self._http.HTTPError, self.errors.XetDownloadError, OSError) as error:
                if how_far() > reached:
                    attempt, reached, wait = 0, how_far(), FIRST_WAIT_SECONDS
                attempt += 1
                most = attempts or (ATTEMPTS if self.requests else FIRST_ATTEMPTS)
                pause = self._pause(error, wait)
                if pause is None and not self._is_of_the_hub(error):
                    raise  # the disk's
                if pause is None or attempt >= most or pause > LONGEST_WAIT_SECONDS:
                    raise self._explained(repository, what, error) from None
                again = f"trying again in {pause:.0f} s ({attempt} of {most - 1})"
                self._tell(f"{what}: {self._in_short(error)}; {again}")
            end = time.monotonic() + pause
            while time.monotonic() < end:
                if stop():
                    raise Interrupted
                time.sleep(min(0.1, max(0.0, end - time.monotonic())))
            wait *= 2

    def clean(self, text: str) -> str:
        """A text of the client or the server on one line, without tokens and without signatures in URLs."""
        token = self.token or self.library.get_token()
        if token:
            text = text.replace(token, "hf_***")
        return " ".join(QUERY.sub(r"\1", TOKEN.sub("hf_***", text)).split())

    def _stream(self, repository: Repository, file: str, start: int, count: int) -> Iterator[bytes]:
        """`count` bytes from `start`, as they come; fewer where the reply is short."""
        if count == 0:
            return
        url = self.library.hf_hub_url(repository.id, file, revision=repository.commit)
        headers = self.utils.build_hf_headers(token=self.token)
        headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        with self.utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
            if response.status_code >= 400:
                response.read()  # what the server says
            self.utils.hf_raise_for_status(response)
            skip = 0
            if response.status_code != 206:
                skip = start  # the server sends the whole file
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise self._http.RemoteProtocolError("the reply is of another range")
            left = count
            for chunk in response.iter_raw(COPY_BYTES):
                passed = min(skip, len(chunk))
                skip -= passed
                part = chunk[passed : passed + left]
                left -= len(part)
                if part:
                    yield part
                if not left:
                    return

    def _count(self) -> None:
        """Count what the client's session sends and gets; it makes a new one after some errors."""
        session = self.utils.get_session()
        if session is self._counted:
            return
        self._counted = session
        # The client's own is none: a stalled reply would be waited for for ever. Long enough for a commit of many files.
        session.timeout = self._http.Timeout(COMMIT_TIMEOUT_SECONDS, connect=TIMEOUT_SECONDS)

        def count(response: Any) -> None:
            with self._lock:
                self.requests += 1
            close = response.close

            def closed() -> None:
                if not response.is_closed:
                    with self._lock:
                        self.bytes += response.num_bytes_downloaded
                close()

            response.close = closed

        hooks = session.event_hooks
        session.event_hooks = {**hooks, "response": [*hooks["response"], count]}

    def _is_of_the_hub(self, error: Exception) -> bool:
        errors = self.errors
        kinds = (
            self._http.HTTPError,
            errors.XetDownloadError,
            errors.OfflineModeIsEnabled,
            errors.LocalEntryNotFoundError,
            errors.LocalTokenNotFoundError,
        )
        return isinstance(error, kinds)

    def _pause(self, error: Exception, wait: float) -> float | None:
        """Seconds after which a request may succeed; None where it will not."""
        if isinstance(error, self.errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            return self._pause(error.__cause__, wait)
        if isinstance(error, self.errors.OfflineModeIsEnabled):
            return None
        response = getattr(error, "response", None)
        if response is not None:
            if response.status_code not in PASSING:
                return None
            asked = _seconds(response.headers)
            return wait if asked is None else asked
        if isinstance(error, (self._http.TransportError, self.errors.XetDownloadError)):
            return wait
        if type(error) is OSError and error.errno is None:  # "Consistency check failed", by the client
            return wait
        return None

    def _in_short(self, error: Exception) -> str:
        response = getattr(error, "response", None)
        if response is not None:
            return f"the Hub answers {response.status_code}"
        return f"the connection failed ({type(error).__name__})"

    def _explained(self, repository: str, what: str, error: Exception) -> HubError:
        """One line: what, what is wrong, what to do."""
        if isinstance(error, self.errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        endpoint = self.endpoint
        errors, response = self.errors, getattr(error, "response", None)
        status = None if response is None else response.status_code
        if isinstance(error, errors.LocalTokenNotFoundError):
            return HubError(f"pushing needs a token that may write: {LOG_IN}")
        if isinstance(error, errors.OfflineModeIsEnabled):
            return HubError(f"{what}: the Hub is switched off by HF_HUB_OFFLINE; unset it")
        if isinstance(error, errors.GatedRepoError):
            return HubError(
                f"{what}: gated: accept its conditions at {endpoint}/{repository}, then {LOG_IN} of that account"
            )
        if isinstance(error, errors.DisabledRepoError):
            return HubError(f"{what}: access to it is disabled on the Hub")
        if isinstance(error, errors.RevisionNotFoundError):
            return HubError(f"{what}: no such branch, tag or commit; see {endpoint}/{repository}/tree/main")
        if isinstance(error, errors.RepositoryNotFoundError):
            return HubError(
                f"{what}: neither a folder here nor a repository on {endpoint} that you may see: check the name; if it is "
                f"private, {LOG_IN}"
            )
        if isinstance(error, errors.EntryNotFoundError):
            return HubError(f"{what}: is not in the repository")
        if status == 401:
            return HubError(f"{what}: the Hub does not accept the token: {LOG_IN}")
        if status == 403:
            return HubError(f"{what}: the token does not permit that: {self._said(error)}; {LOG_IN} that does")
        if status == 409:
            return HubError(f"{what}: somebody else is changing it: {self._said(error)}; run the same command again")
        if status == 412:
            return HubError(f"{what}: somebody else has changed it in between; run the same command again")
        if status == 429:
            asked = _seconds(response.headers)  # type: ignore[union-attr]
            for_how_long = "" if asked is None else f" for {asked:.0f} s"
            return HubError(
                f"{what}: too many requests: the Hub asks to wait{for_how_long} (429); wait, {LOG_IN} for a higher limit, and "
                "run the same command again"
            )
        if status is not None and status >= 500:
            return HubError(f"{what}: the Hub failed {ATTEMPTS} times ({status}); run the same command again later")
        if status is not None:
            return HubError(f"{what}: the Hub refuses ({status}): {self._said(error)}")
        return HubError(
            f"{what}: {endpoint} cannot be reached ({type(error).__name__}: {self.clean(str(error))[:120]}); check the network and "
            "run the same command again"
        )

    def _said(self, error: Exception) -> str:
        said = getattr(error, "server_message", None) or str(error).partition("\n\n")[2] or str(error)
        return self.clean(said)[:200].rstrip(".")


def pieces_of(path: Path) -> Iterator[bytes]:
    """The content of a file on this machine."""
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(COPY_BYTES):
            yield data


def _wrong_content(repository: Repository, file: RemoteFile) -> HubError:
    return HubError(
        f"{repository.id}: {file.name}: fetched {WRONG_CONTENT_ATTEMPTS} times, and its content never was what the Hub says (hash "
        f"{file.identity[:16]}...); run the same command again, and if it stays so tell the owner of the repository"
    )


def _seconds(headers: Any) -> float | None:
    """What Retry-After asks for, in seconds; None for a date, which nobody sends here."""
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None
