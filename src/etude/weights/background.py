"""Publishing beside the next optimizer step."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from etude.errors import RunError
from etude.types import Manifest
from etude.weights.publisher import Publisher
from etude.weights.tensors import FlatTensor


class BackgroundPublisher:
    """Publishes one version at a time in a thread; the next one starts when the last has ended."""

    def __init__(self, publisher: Publisher, *, timeout_s: float = 600.0) -> None:
        """Give the publisher away: nobody else calls it. `timeout_s` is how long `join` waits."""
        self._publisher = publisher
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._running: tuple[int, Future[Manifest]] | None = None

    def start(self, *, version: int, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Wait for the last version, copy these weights and return; the caller may change them at once.

        Raises what went wrong with the last version.
        """
        self.join()
        copies = self._publisher.snapshot(tensors)
        self._running = (version, self._thread.submit(self._publish, version, step, copies))

    def join(self) -> Manifest | None:
        """Wait until the version under way is published; None when there was none. Raises what went wrong with it."""
        if self._running is None:
            return None
        version, future = self._running
        try:
            manifest = future.result(self._timeout_s)
        except TimeoutError as error:
            msg = f"publishing version {version} took over {self._timeout_s:.0f} s; check the run's store, then resume"
            raise RunError(msg) from error
        finally:
            self._running = None
        return manifest

    def close(self) -> None:
        """Publish what is under way and end the thread."""
        try:
            self.join()
        finally:
            self._thread.shutdown(wait=False)

    def _publish(self, version: int, step: int, tensors: Mapping[str, FlatTensor]) -> Manifest:
        return asyncio.run(self._publisher.publish_snapshot(version=version, step=step, tensors=tensors))
