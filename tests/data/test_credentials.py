"""URLs that hold credentials: no error, warning, repr or traceback shows them. Files of an HTTP server may change."""

import http.server
import itertools
import pickle
import threading
import traceback

import pytest

from seqwarm_kernels.cli import main
from seqwarm_kernels.data import ChunkError, ChunkSource, MegatronSource, ParquetSource, TokenSource
from seqwarm_kernels.data import write_chunks as write
from seqwarm_kernels.data.files.remote import (
    check_location,
    check_named_once,
    file_size,
    local_file,
    open_file,
    read_range,
)
from seqwarm_kernels.utils.urls import without_secrets

from .token_files import END, documents, write_flat

QUERY = "X-Amz-Credential=hidden%2F20260101&X-Amz-Signature=hidden"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with `content`, or with the error `status`, and with a changed ETag for each content."""

    content, status = b"", 200

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        if self.status != 200:
            self.send_error(self.status)
            return
        begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = self.content[int(begin) : int(end or len(self.content)) + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hash(self.content)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    do_GET = do_HEAD


@pytest.fixture
def server(monkeypatch):
    """The handler of a server, and the URL of its folder with a user and password."""
    pytest.importorskip("upath")
    for name in ("content", "status"):
        monkeypatch.setattr(Handler, name, getattr(Handler, name))  # put back at the end
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield Handler, f"http://user:hidden@127.0.0.1:{running.server_port}/folder"
    running.shutdown()
    running.server_close()


def assert_hidden(*texts):
    for text in texts:
        assert "hidden" not in text
        assert "user:" not in text


#: Uses of a URL of a file that fail.
USES = {
    "text": lambda url: list(ChunkSource(url.format("a.txt"))),
    "no folder": lambda url: ChunkSource(url.format("a.txt"), with_lengths=True),
    "no folders": lambda url: ChunkSource([url.format("a.txt")], with_lengths=True),
    "list": lambda url: list(ChunkSource([url.format("a.txt"), url.format("b.jsonl.gz")])),
    "wrong suffix": lambda url: ChunkSource([url.format("a.csv")]),
    "twice": lambda url: ChunkSource([url.format("a.txt")] * 2),
    "cached": lambda url: list(ChunkSource("filecache::" + url.format("a.txt"))),
    "parquet": lambda url: ParquetSource(url.format("a.parquet")),
    "tokens": lambda url: TokenSource(url.format("train.bin"), end_token=END),
    "ends": lambda url: TokenSource("nowhere.bin", document_ends=url.format("ends.npy")),
    "megatron": lambda url: MegatronSource(url.format("train.idx")),
    "chain": lambda url: ChunkSource("zip://a::" + url.format("a.zip")),
    "unknown": lambda url: ChunkSource(url.format("a").replace("http", "nothing")),
    "write": lambda url: write(["a"], url.format("chunks"), progress=False),
    "size": lambda url: file_size(check_location("path", url.format("a"))),
    "open": lambda url: open_file(check_location("path", url.format("a"))),
}


@pytest.mark.parametrize("name", USES)
def test_errors_hide_credentials(server, name):
    """Also the errors of fsspec and of its client, which hold the URL."""
    handler, folder = server
    if name == "parquet":
        pytest.importorskip("pyarrow")
    for status in (403, 500) if name in ("size", "open") else (200, 403, 500):
        handler.status, handler.content = status, b"\xff\xfe" if status == 200 else b""
        with pytest.raises((ValueError, OSError)) as caught:
            USES[name](f"{folder}/{{}}?{QUERY}")
        shown = "".join(traceback.format_exception(caught.value))
        assert_hidden(
            str(caught.value), repr(caught.value), *(each for each in shown.splitlines() if "{QUERY}" not in each)
        )
        assert isinstance(caught.value, ChunkError) or name not in ("list", "tokens", "megatron", "parquet")


def test_warnings_progress_and_the_command_line_hide_credentials(server, capsys):
    handler, folder = server
    handler.content = b"\xff\xfe"
    source = ChunkSource([f"{folder}/a.txt?{QUERY}"], on_error="skip")
    with pytest.warns(UserWarning, match=r"skipped: http://\*\*\*@127") as caught:
        list(source)
    assert main(["padding", "--data", f"{folder}/train.bin?{QUERY}", "--end-token", "5"]) == 2
    assert_hidden(*(str(each.message) for each in caught), str(source.skipped), *capsys.readouterr())


def test_text_and_repr_of_a_path():
    upath = pytest.importorskip("upath")
    path = check_location("path", f"https://user:hidden@host/a/train.bin?{QUERY}")
    assert str(path) == "https://***@host/a/train.bin?***"
    assert repr(path) == f"RemotePath({str(path)!r})"
    assert path.name == "train.bin"
    assert str(path.parent / "b") == "https://***@host/a/b"
    options = upath.UPath("s3://bucket/a?b", key="user", secret="hidden", client_kwargs={"token": "hidden"})
    path = check_location("path", options)
    assert (str(path), repr(path)) == ("s3://bucket/a?b", "RemotePath('s3://bucket/a?b')")
    assert pickle.loads(pickle.dumps(path)).upath.storage_options["secret"] == "hidden"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("403, url='https://h/a?sig=hidden', code", "403, url='https://h/a?***', code"),
        ("URL('http://user:hidden@h:80/a')", "URL('http://***@h:80/a')"),
        ("ftp://user:p@hidden@h/a and sftp://hidden@h/b", "ftp://***@h/a and sftp://***@h/b"),
        ("s3://bucket/a@b: no such file?", "s3://bucket/a@b: no such file?"),
        ("what? nothing", "what? nothing"),
        ("see https://h/a?sig='hidden'&b=it'shidden, then", "see https://h/a?*** then"),
        ("https://user:pa'ss?hidden@h", "https://***@h"),
    ],
)
def test_text_without_secrets(text, shown):
    assert without_secrets(text) == shown


def test_a_signature_does_not_tell_files_apart(server, tmp_path):
    """The copy and the state of a file are kept when its URL is signed again."""
    handler, folder = server
    handler.content = write_flat(tmp_path, documents(20)).read_bytes()
    first, second = (TokenSource(f"{folder}/train.bin?X-Amz-Signature={each}", end_token=END) for each in "ab")
    assert first._files[0].file.local == second._files[0].file.local
    second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("header", ["ETag", "X-Other"])
def test_a_query_tells_files_apart(server, monkeypatch, header):
    """Files of one size, whose server may tell no version, do not share a copy."""
    handler, folder = server
    send_header = handler.send_header
    monkeypatch.setattr(
        handler, "send_header", lambda self, key, value: send_header(self, key.replace("ETag", header), value)
    )
    for prefix in ("", "filecache::"):
        paths = [check_location("path", f"{prefix}{folder}/a.txt?id={number}") for number in range(2)]
        check_named_once("paths", paths, "file")
        for number, path in enumerate(paths):
            handler.content = b"file %d" % number
            assert [path.read_bytes(), local_file(path).read_bytes()] == [handler.content] * 2


def test_a_file_of_http_that_changes_is_fetched_again(server):
    """Also if it has the same size."""
    handler, folder = server
    for prefix, (content, name) in itertools.product(("", "filecache::"), ((b"one", "a"), (b"two", "a"), (b"2", "a"))):
        handler.content = content
        path = check_location("path", f"{prefix}{folder}/{name}")
        copy = local_file(path)
        assert [path.read_bytes(), copy.read_bytes(), local_file(path)] == [content, content, copy]
        assert [read_range(path, 0, 1), read_range(path, 1, None)] == [content[:1], content[1:]]
        with open_file(path) as file:
            file.seek(-1, 2)
            assert file.read() == content[-1:]


def test_files_of_other_stores_with_the_same_name():
    upath = pytest.importorskip("upath")
    stores = [upath.UPath("s3://bucket/a", endpoint_url=f"http://{host}") for host in ("a", "b", "a")]
    paths = [check_location("path", each) for each in stores]
    check_named_once("paths", paths[:2], "file")
    with pytest.raises(ValueError, match="paths must name each file once, got s3://bucket/a twice"):
        check_named_once("paths", paths, "file")
