# pyright: basic
"""An S3 server in a process of its own; needs `moto_server` (pip install 'moto[server]')."""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=1):
            return True
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False


@pytest.fixture(scope="session")
def endpoint():
    """URL of a server that has one bucket, `bucket`."""
    program = shutil.which("moto_server")
    if program is None:
        pytest.skip("moto_server is not installed: pip install 'moto[server]'")
    port = free_port()
    server = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 30
        bucket = urllib.request.Request(f"{url}/bucket", method="PUT")
        while not answers(bucket):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip("moto_server does not start here")
        yield url
    finally:
        server.terminate()
        server.wait(10)
