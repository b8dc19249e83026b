"""An S3 server in a thread of the tests, moto's, that can be told to fail."""

import os
import threading
from contextlib import closing, contextmanager
from unittest import mock


class FaultyServer:
    """Answers as S3. `fail` makes the next answers fail."""

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, *args):
                pass

        self._moto = DomainDispatcherApplication(create_backend_app)
        self._fault, self.faults_left = ("", "", ""), 0
        self.requests = []  #: method and path of each request
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Silent)
        self._server.daemon_threads, self._server.block_on_close = True, False  # clients keep their connections
        self.url = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def fail(self, kind, part="", *, method="GET", times=1):
        """Let `times` answers to requests for a path with `part` fail.

        Args:
            kind: "500", or "cut" in the middle of the answer.
        """
        self._fault, self.faults_left = (kind, method, part), times
        yield
        self.faults_left = 0

    def _answer(self, environ, start_response):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        self.requests.append((method, path))
        kind, failing, part = self._fault
        if not (self.faults_left and method == failing and part in path):
            return self._moto(environ, start_response)
        self.faults_left -= 1
        if kind == "500":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Type", "application/xml"), ("Content-Length", "0")])
            return [b""]
        return _cut(b"".join(self._moto(environ, start_response)))


def _cut(content):
    yield content[: len(content) // 2]
    raise ConnectionResetError("cut by the test")


@contextmanager
def served_bucket():
    """A server with an empty bucket, "bucket". The environment variables of this process lead to it."""
    import s3fs

    with closing(FaultyServer()) as server:
        client = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
            "AWS_MAX_ATTEMPTS": "1",  # botocore waits half a second before another one
        }
        with mock.patch.dict(os.environ, client):
            s3fs.S3FileSystem().mkdir("bucket")
            yield server
