"""A real S3 server (moto) in a process of its own, on a free port of the loopback interface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

START = """
import sys, boto3
address = sys.argv[1]
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
boto3.client("s3", endpoint_url=f"http://{address}:{port}", region_name="us-east-1",
             aws_access_key_id="test", aws_secret_access_key="test").create_bucket(Bucket="bucket")
print(port, flush=True)
sys.stdin.read()
"""


class S3Server:
    """The server; it ends with this process, whose pipe it reads."""

    def __init__(self, address: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        """Start it.

        Args:
            address: To listen on.
            prefix: Command that runs it, such as ``ip netns exec``.
        """
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", START, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = f"http://{address}:{int(self._process.stdout.readline())}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()
