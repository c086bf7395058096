"""Where the versions of a run are published: in the lineage of the head, or in one that begins."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from etude.errors import IntegrityError, ObjectMissingError, VersionTakenError
from etude.interfaces import Bucket
from etude.weight_types import Head
from etude.weights.codec import RICE_ULP, Difference
from etude.weights.commits import Announce
from etude.weights.digest import version_digest
from etude.weights.packing import slices
from etude.weights.publisher import PublishedDtype, Publisher, copies, new_lineage, open_publisher
from etude.weights.ranks import entries_of, snapshot_of
from etude.weights.reader import read_head


class Line:
    """Finds out where a trainer that was brought back may publish."""

    def __init__(
        self,
        store: Bucket,
        *,
        announce: Announce,
        dtype: PublishedDtype = "float32",
        anchor_share: float = 0.5,
        skips: Sequence[int] = (8, 64),
        difference: Difference = RICE_ULP,
        encoders: int = 1,
        uploads: int = 4,
    ) -> None:
        """Publish into `store`; `announce` hears of every version before the head does."""
        self._store = store
        self._announce = announce
        self._dtype: PublishedDtype = dtype
        self._anchor_share = anchor_share
        self._skips = skips
        self._difference: Difference = difference
        self._encoders = encoders
        self._uploads = uploads

    async def is_head(self, *, version: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the head names this version with exactly these bytes.

        Raises:
            StoreError: The store failed.
        """
        head = await read_head(self._store)
        if head is None or head.version != version:
            return False
        held = snapshot_of(slices(copies(tensors, self._dtype)))
        return version_digest(entries_of(held)) == head.digest

    async def go_on(
        self, *, version: int, step: int, tensors: Mapping[str, Tensor], fork: str = ""
    ) -> tuple[Publisher, Head, str]:
        """Publish a version where a run goes on; return who publishes the next ones, the head, and why it forked.

        That is in the lineage of the head when it can be: the head names these very weights, or an older version that
        they come after. Else, or when the caller has a reason to `fork`, it is in a new lineage.

        Raises:
            FencedError: Another trainer took the run over.
            StoreError: The store failed.
        """
        head = await read_head(self._store)
        why = fork or "the run starts"
        if head is not None and not fork:
            try:
                publisher = await self._open(head.lineage)
                await publisher.publish(version=version, step=step, tensors=tensors)
            except (VersionTakenError, IntegrityError, ObjectMissingError) as error:
                why = str(error)
            else:
                return publisher, _head_of(publisher), ""
        publisher = await self._open(new_lineage(await read_head(self._store)))
        await publisher.publish(version=version, step=step, tensors=tensors)
        return publisher, _head_of(publisher), why

    async def _open(self, lineage: str) -> Publisher:
        return await open_publisher(
            self._store,
            lineage=lineage,
            dtype=self._dtype,
            anchor_share=self._anchor_share,
            skips=self._skips,
            announce=self._announce,
            difference=self._difference,
            encoders=self._encoders,
            uploads=self._uploads,
        )


def _head_of(publisher: Publisher) -> Head:
    assert publisher.head is not None
    return publisher.head
