"""Chains of views: what a fleet of one precision holds of each version, published beside the version itself.

Versions keep their lineage, number and step, and name the digest of what they are a view of. Whoever makes a view, a
sampler or this, finds the same bits, so it does not matter where it runs, or that it is started again.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from etude.interfaces import Bucket, Clock
from etude.policy.views import View, in_view
from etude.weight_types import Manifest
from etude.weights.chain import ChainKeys
from etude.weights.codec import RICE_ULP, Difference
from etude.weights.follower import Follower, StagedVersion
from etude.weights.leases import LeaseKeeper
from etude.weights.publisher import Publisher, open_publisher
from etude.weights.tensors import FlatTensor, flatten


def view_keys(view: View) -> ChainKeys:
    """Return where the chain of a view lies."""
    return ChainKeys(f"views/{view}")


def flat_view(staged: StagedVersion, view: View) -> dict[str, FlatTensor]:
    """Return the tensors of a view of a version, by name."""
    return {name: flatten(tensor) for name, tensor in sorted(in_view(staged.tensors, view).items())}


class Deriver:
    """Follows the policy's chain and publishes one of its views.

    Versions that were published while one was derived are skipped, except the newest.
    """

    def __init__(
        self,
        store: Bucket,
        *,
        view: View,
        clock: Clock,
        poll_s: float = 0.2,
        anchor_share: float = 0.5,
        difference: Difference = RICE_ULP,
    ) -> None:
        """Derive in `store`; `difference` codes the changes, and `anchor_share` says when the next anchor is due."""
        self._store = store
        self._view: View = view
        self._anchor_share = anchor_share
        self._difference: Difference = difference
        lease = LeaseKeeper(store, keys=ChainKeys(), reader=f"derive-{view}")
        self._follower = Follower(store, clock=clock, poll_s=poll_s, lease=lease)
        self._publisher: Publisher | None = None

    async def derived(self) -> AsyncGenerator[Manifest]:
        """Publish the view of each version, forever, and yield its manifest.

        Raises:
            FencedError: Another one derives this view now.
            IntegrityError: A chain stays damaged.
            StoreError: The store stays out of reach.
        """
        async with aclosing(self._follower.staged()) as versions:
            async for staged in versions:
                yield await self.derive(staged)

    async def poll(self) -> Manifest | None:
        """Publish the view of the newest version; None when that was done or nothing is published. Errors as above."""
        staged = await self._follower.poll()
        return None if staged is None else await self.derive(staged)

    async def derive(self, staged: StagedVersion) -> Manifest:
        """Publish the view of a version; once it is published this changes nothing."""
        publisher = self._publisher
        if publisher is None or publisher.lineage != staged.lineage:
            publisher = self._publisher = await open_publisher(
                self._store,
                lineage=staged.lineage,
                anchor_share=self._anchor_share,
                difference=self._difference,
                keys=view_keys(self._view),
            )
        tensors = await asyncio.to_thread(flat_view, staged, self._view)
        return await publisher.publish_snapshot(
            version=staged.version, step=staged.step, tensors=tensors, source=staged.digest
        )

    async def close(self) -> None:
        """Give the lease on the policy's chain back."""
        await self._follower.close()
