"""Publishing beside the next optimizer step."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from etude.errors import RunError
from etude.weight_types import Head, Manifest
from etude.weights.line import Line
from etude.weights.publisher import Publisher
from etude.weights.tensors import FlatTensor


class BackgroundPublisher:
    """Publishes one version at a time in a thread; the next one starts when the last has ended."""

    def __init__(
        self, publisher: Publisher | None = None, *, line: Line | None = None, timeout_s: float = 600.0
    ) -> None:
        """Give the publisher away: nobody else calls it. Without one, `settle` comes before `start`.

        `timeout_s` is how long `join` waits.
        """
        self._publisher = publisher
        self._line = line
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._running: tuple[int, Future[Manifest]] | None = None
        self._seconds = 0.0
        """That the last version took."""

    def start(self, *, version: int, step: int, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Wait for the last version, copy these weights and return; the caller may change them at once.

        Returns metrics: how long it waited and copied, and what the last version took. Raises what went wrong with it.
        """
        began = time.perf_counter()
        published = self.join()
        waited = time.perf_counter()
        publisher = self._publisher
        if publisher is None:
            msg = f"version {version} cannot be published before it is known in which lineage: recover first"
            raise RunError(msg)
        copies = publisher.snapshot(tensors)
        self._running = (version, self._thread.submit(self._publish, publisher, version, step, copies))
        metrics = {"weights/publish_wait_s": waited - began, "weights/copy_s": time.perf_counter() - waited}
        if published is not None:
            metrics["weights/publish_s"] = self._seconds
            metrics["weights/bytes"] = float(sum(piece.length for piece in published.pieces))
        return metrics

    def is_head(self, *, version: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the head names this version with exactly these bytes."""
        self.join()
        assert self._line is not None
        return asyncio.run(self._line.is_head(version=version, tensors=tensors))

    def settle(self, *, version: int, step: int, tensors: Mapping[str, Tensor], fork: str = "") -> tuple[Head, str]:
        """Publish these weights where the run goes on (see `Line.go_on`), and later versions after them.

        Return the head, and why a new lineage was opened; an empty text when none was.
        """
        self.join()
        assert self._line is not None
        made = self._line.go_on(version=version, step=step, tensors=tensors, fork=fork)
        self._publisher, head, why = asyncio.run(made)
        return head, why

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

    def _publish(self, publisher: Publisher, version: int, step: int, tensors: Mapping[str, FlatTensor]) -> Manifest:
        began = time.perf_counter()
        manifest = asyncio.run(publisher.publish_snapshot(version=version, step=step, tensors=tensors))
        self._seconds = time.perf_counter() - began
        return manifest
