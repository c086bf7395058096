# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""An S3 server in this process that answers as the servers of bug reports do."""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


class Answer:
    """What a server says instead of doing what it was asked for."""

    def __init__(self, status: int, code: str = "", *, message: str = "", after: bool = False, **headers: str) -> None:
        """With `after`, the request is carried out all the same."""
        self.status = status
        self.after = after
        self.headers = headers
        self.body = ERROR.format(code=code, message=message).encode() if code else b""


class Hangup(Answer):
    """The connection ends without an answer."""

    def __init__(self, *, after: bool = False) -> None:
        super().__init__(0, after=after)


class OddS3:
    """Objects of one bucket, `bucket`, and how the server is odd."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.puts: deque[Answer | None] = deque()
        """Answers to the next puts; None is an honest one."""
        self.gets: deque[Answer | None] = deque()
        self.always: Answer | None = None
        self.tag: Callable[[bytes], str] = lambda data: f'"{hashlib.md5(data).hexdigest()}"'
        """ETag of an object, as the server says it."""
        self.matches: Callable[[str, str], bool] = lambda asked, tag: asked == tag
        self.honours_conditions = True
        self.ignores_ranges = False
        self.keeps = False
        """Whether it answers that it may not delete."""
        self.cut_bodies = 0
        """So many of the next bodies end after half."""
        self.junk: list[str] = []
        """Keys that are listed beside the objects, such as the markers of folders."""
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server: "_Server"

    def log_message(self, *_: object) -> None:
        pass

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket").removeprefix("/")

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 17:00:00 GMT")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _instead(self, queue: deque[Answer | None]) -> Answer | None:
        with self.server.odd.lock:
            found = queue.popleft() if queue else None
            return found or self.server.odd.always

    def _say(self, answer: Answer) -> None:
        if isinstance(answer, Hangup):
            self.close_connection = True
            self.connection.close()
            return
        self._answer(answer.status, answer.body, **answer.headers)

    def _note(self) -> None:
        self.server.odd.requests.append((self.command, self.path, dict(self.headers.items())))

    def do_PUT(self) -> None:
        odd, key = self.server.odd, self._key()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._note()
        instead = self._instead(odd.puts)
        if instead is not None and not instead.after:
            self._say(instead)
            return
        with odd.lock:
            there = odd.objects.get(key)
            wanted = self.headers.get("If-Match")
            if odd.honours_conditions:
                if self.headers.get("If-None-Match") == "*" and there is not None:
                    refused = 412
                elif wanted is not None and there is None:
                    refused = 404
                elif wanted is not None and not odd.matches(wanted, odd.tag(there)):
                    refused = 412
                else:
                    refused = 0
            else:
                refused = 0
            if not refused:
                odd.objects[key] = data
        if refused:
            self._answer(refused, ERROR.format(code="PreconditionFailed", message="").encode())
        elif instead is not None:
            self._say(instead)
        else:
            self._answer(200, ETag=odd.tag(data))

    def do_GET(self) -> None:
        odd, parts = self.server.odd, urlsplit(self.path)
        self._note()
        instead = self._instead(odd.gets)
        if instead is not None:
            self._say(instead)
            return
        query = parse_qs(parts.query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
            return
        data = odd.objects.get(self._key())
        if data is None:
            self._answer(404, ERROR.format(code="NoSuchKey", message="").encode())
            return
        tag = odd.tag(data)
        if self.headers.get("If-None-Match") == tag:
            self._answer(304, ETag=tag)
            return
        asked = self.headers.get("Range", "")
        if asked and not odd.ignores_ranges:
            start, _, end = asked.removeprefix("bytes=").partition("-")
            whole, data = len(data), data[int(start) : int(end) + 1 if end else None]
            spans = f"bytes {start}-{int(start) + len(data) - 1}/{whole}"
            self._answer(206, data, ETag=tag, Content_Range=spans)
            return
        if odd.cut_bodies:
            odd.cut_bodies -= 1
            self._answer(200, data[: len(data) // 2], ETag=tag, Content_Length=str(len(data)))
            self.close_connection = True
            return
        self._answer(200, data, **({"ETag": tag} if tag else {}))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        """Delete many objects, which Google and Alibaba do not do."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._note()
        self._answer(501, ERROR.format(code="NotImplemented", message="").encode())

    def do_DELETE(self) -> None:
        odd = self.server.odd
        self._note()
        if odd.keeps:
            self._answer(403, ERROR.format(code="AccessDenied", message="").encode())
            return
        odd.objects.pop(self._key(), None)
        self._answer(204)

    def _list(self, prefix: str) -> None:
        odd = self.server.odd
        keys = sorted(key for key in [*odd.objects, *odd.junk] if key.startswith(prefix))
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-30T17:00:00.000Z</LastModified>"
            f"<ETag>&quot;0&quot;</ETag><Size>{len(odd.objects.get(key, b''))}</Size></Contents>"
            for key in keys
        )
        body = f"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        self._answer(200, body.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, odd: OddS3) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.odd = odd

    def handle_error(self, *_: object) -> None:
        """A connection that was cut is meant."""


@contextmanager
def serving(odd: OddS3) -> Generator[str]:
    """Yield the URL of a server with these objects."""
    server = _Server(odd)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
