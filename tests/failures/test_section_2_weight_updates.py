# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Weights on their way from the trainer to the samplers: lost, late, mixed, or another version's."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from failure_kit import request, sampler
from msgspec.structs import replace

from etude.errors import ObjectMissingError, SamplerError, StoreError
from etude.gateway.ingest import CompletionError, check_completion
from etude.policy.digest import held_digest
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.sampling.doubles import FakeEngine
from etude.sampling.engine import Forced
from etude.sampling.engines.torch_cache import PrefixCache
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.faulty import EngineFaults, FaultyEngine
from etude.sampling.router import SamplerRouter
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.types import Completion, FinishReason, VersionRun
from etude.weights.chain import HEAD_KEY, parse_head
from etude.weights.follower import Follower
from etude.weights.publisher import open_publisher
from etude.weights.reader import load_head, load_version, read_head

WAITS = {"P-26": "adapters: their names will be digests of their bytes, as versions are named by theirs"}

SHAPE = PolicyShape(
    model_type="llama", vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_hidden=48,
    qk_norm=False, max_context=128,
)  # fmt: skip
PROMPT = tuple(range(3, 23))


def policy(seed):
    made = random_policy(SHAPE, seed=seed)
    with torch.no_grad():
        for name, tensor in made.hf_tensors().items():
            if not name.endswith("norm.weight"):
                tensor.mul_(12)  # far from uniform, so that other weights draw other tokens
    return made


def weights(version):
    generator = torch.Generator().manual_seed(0)
    return {f"w{n}": torch.randn(32, 16, generator=generator) + 1e-3 * version for n in range(3)}


async def publish(store, versions, **options):
    publisher = await open_publisher(store, lineage="l", **options)
    return [await publisher.publish(version=n, step=n, tensors=weights(n)) for n in versions]


def follower(store, **options):
    return Follower(store, clock=ManualClock(), **options)


class Watched:
    """A store that counts what is read of it, and may hand one object over damaged, however often within one try."""

    def __init__(self, inner, damaged=""):
        self.inner, self.damaged, self.left, self.reads = inner, damaged, 3, Counter()

    async def get(self, key, *, max_bytes=None):
        data = await self.inner.get(key, max_bytes=max_bytes)
        self.reads["manifests" if "/manifests/" in key else "objects" if "/objects/" in key else "heads"] += 1
        if self.damaged and key.endswith(self.damaged) and self.left:
            self.left -= 1
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    async def put(self, key, data, *, create_only=False):
        await self.inner.put(key, data, create_only=create_only)

    async def compare_and_swap(self, key, data, *, expected):
        return await self.inner.compare_and_swap(key, data, expected=expected)

    async def list(self, prefix):
        return await self.inner.list(prefix)


class Sender:
    """The mistake: differences against what was sent last, whatever the receivers answered."""

    def __init__(self, receivers):
        self.receivers, self.sent = receivers, weights(0)

    def send(self, new):
        for receiver in self.receivers:
            receiver({name: new[name] - self.sent[name] for name in new})
        self.sent = new


@pytest.mark.row("P-17")
async def test_a_sampler_that_refuses_a_damaged_difference_ends_up_with_the_same_bytes():
    """A damaged difference is refused by one sampler, which builds the version anew from its full copy."""
    held = [weights(0), weights(0)]

    def receiver(index, refuses):
        def receive(difference):
            if refuses.pop(0):
                return False, "checksum mismatch"
            held[index] = {name: held[index][name] + difference[name] for name in difference}
            return True, ""

        return receive

    sender = Sender([receiver(0, [False] * 3), receiver(1, [False, True, False])])
    for version in (1, 2, 3):
        sender.send(weights(version))
    assert all(torch.allclose(held[0][name], tensor) for name, tensor in weights(3).items())
    assert not any(torch.allclose(held[1][name], tensor, atol=1e-4) for name, tensor in weights(3).items())

    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="l", anchor_share=99.0)
    first, second = Watched(store), Watched(store)
    readers = [follower(first), follower(second)]
    for version in range(4):
        manifest = await publisher.publish(version=version, step=version, tensors=weights(version))
        second.damaged = manifest.pieces[0].object if version == 2 else ""
        staged = [await reader.poll() for reader in readers]
        for one in staged:
            assert (one.version, held_digest(one.tensors)) == (version, manifest.digest)
    assert second.reads["manifests"] == first.reads["manifests"] + 3


@pytest.mark.row("P-17")
async def test_a_sampler_whose_engine_drops_an_update_finds_out_and_never_draws_with_the_old_weights():
    """A sampler compares the engine's memory with the version after each swap, and serves nothing when it differs."""
    old, new = policy(0), policy(1)
    engine = FaultyEngine(TorchEngine(SHAPE, old.hf_tensors()), EngineFaults(lost_updates=1))
    engine.stage(new.hf_tensors())()
    assert engine.held_digest() == held_digest(old.hf_tensors())  # it said that it was done

    class Staged:
        lineage, version, digest, tensors = "l", 4, held_digest(new.hf_tensors()), new.hf_tensors()

    for lost, serves in ((1, True), (9, False)):
        engine = FaultyEngine(TorchEngine(SHAPE, old.hf_tensors()), EngineFaults(lost_updates=lost))
        async with sampler(engine) as served:
            await served.stage(Staged)
            (status,) = await served.status()
            assert (status.fault == "") is serves
            assert (status.held == Staged.digest) is serves
            if not serves:
                with pytest.raises(SamplerError, match="an update was lost"):
                    await served.sample(request("a", PROMPT, max_tokens=2))


@pytest.mark.row("P-19")
async def test_sixteen_long_answers_go_on_while_versions_are_put_in():
    """None of sixteen answers is cut by five updates; each says which version drew which of its tokens."""

    async def played(aborts):
        engine = FakeEngine(step_s=0.001, max_batch=16)
        async with sampler(engine) as served:
            asked = [request(f"r{n}", PROMPT, max_tokens=150, seed=n) for n in range(16)]
            answers = [asyncio.ensure_future(served.sample(one)) for one in asked]
            for version in range(4, 9):
                while (await served.status())[0].steps < 20 * (version - 3) and not aborts:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                if aborts:
                    for one in asked:
                        served.cancel(one.request_id)

                class Staged:
                    lineage, digest, tensors = "l", f"d{version}", {"w": torch.full((4,), float(version))}

                Staged.version = version
                await served.stage(Staged)
            return await asyncio.gather(*answers)

    assert {answer.finish_reason for answer in await played(aborts=True)} == {FinishReason.CANCELLED}
    for answer in await played(aborts=False):
        assert (answer.finish_reason, len(answer.token_ids)) == (FinishReason.LENGTH, 150)
        assert [run.version for run in answer.versions] == [3, 4, 5, 6, 7, 8]


@pytest.mark.row("P-21")
async def test_a_sampler_that_joins_at_version_200_reads_at_most_twenty_differences():
    """However long a run is, a new sampler reads one full copy and at most twenty differences."""
    reads = {}
    for name, options in (("one copy", {"anchor_share": 1e9, "skips": ()}), ("etude", {"anchor_share": 1e9})):
        store = open_store("memory://")
        await publish(store, range(201), **options)
        watched = Watched(store)
        staged = await follower(watched).poll()
        assert staged.version == 200
        reads[name] = watched.reads["manifests"]
    assert reads["one copy"] == 201
    assert reads["etude"] <= 21


@pytest.mark.row("P-23")
async def test_a_slow_reader_finds_every_part_of_a_version_that_was_replaced_long_ago():
    """No part of a published version is ever deleted: a reader may be as slow as it likes."""

    class Cleaned(Watched):
        """The mistake: what is older than two versions goes."""

        async def get(self, key, *, max_bytes=None):
            newest = parse_head(await self.inner.get(HEAD_KEY)).version
            if "/manifests/" in key and int(key.rsplit("/", 1)[1].partition("-")[0]) < newest - 1:
                raise ObjectMissingError(key)
            return await super().get(key, max_bytes=max_bytes)

    for kind, survives in ((Cleaned, False), (Watched, True)):
        store = open_store("memory://")
        publisher = await open_publisher(store, lineage="l", anchor_share=2.0)
        await publisher.publish(version=0, step=0, tensors=weights(0))
        head = await read_head(store)
        written = set(await store.list(""))
        for version in range(1, 30):
            await publisher.publish(version=version, step=version, tensors=weights(version))
        assert written <= set(await store.list(""))
        if not survives:
            with pytest.raises(ObjectMissingError):
                await load_head(kind(store), head)
            continue
        assert (await load_head(kind(store), head)).digest == head.digest
        for version in range(30):
            loaded = await load_version(kind(store), lineage="l", version=version)
            assert loaded.version == version


class Unsalted(PrefixCache):
    """The mistake: keys and values are found by prompt, whichever weights computed them."""

    def store(self, session_id, parked):
        super().store(session_id, parked._replace(salt=0))

    def find(self, session_id, salt, prompt_ids):
        return super().find(session_id, 0, prompt_ids)

    def clear(self):
        pass


def finish(engine, *requests):
    for one in requests:
        engine.admit(one)
    answers = {}
    while len(answers) < len(requests):
        answers |= {answer.request_id: answer for answer in engine.step()}
    return [answers[one.request_id] for one in requests]


def second_turn(engine, new):
    """Draw a turn, swap the weights, and draw the next turn of the session."""
    [first] = finish(engine, request("s", PROMPT, max_tokens=10, seed=1))
    engine.stage(new.hf_tensors())()
    [second] = finish(engine, request("s", (*PROMPT, *first.token_ids, 5, 6), max_tokens=20, seed=2))
    clean = TorchEngine(SHAPE, new.hf_tensors())
    asked = request("clean", (*PROMPT, *first.token_ids, 5, 6))
    clean.admit(asked, Forced(token_ids=second.token_ids))
    answers = ()
    while not answers:
        answers = clean.step()
    gap = np.abs(np.frombuffer(second.sampler_logprobs, "<f4") - np.frombuffer(answers[0].sampler_logprobs, "<f4"))
    return second.cached_tokens, float(gap.max())


@pytest.mark.row("P-25", "P-52")
def test_no_answer_begins_on_keys_and_values_of_other_weights():
    """After an update the next turn of a session is computed from its first token on, and equals a fresh engine's."""
    old, new = policy(0), policy(1)
    stale = TorchEngine(SHAPE, old.hf_tensors())
    stale._prefixes = Unsalted(1 << 20)
    cached, gap = second_turn(stale, new)
    assert cached > 0
    assert gap > 0.1
    cached, gap = second_turn(TorchEngine(SHAPE, old.hf_tensors()), new)
    assert cached == 0
    assert gap < 1e-4


class Elsewhere:
    """The mistake: a sampler that serves what it has, whatever was asked for."""

    def __init__(self, version):
        self.version = version

    async def sample(self, asked):
        return Completion(
            token_ids=(1,),
            sampler_logprobs=np.zeros(1, "<f4").tobytes(),
            versions=(VersionRun(self.version, 1),),
            finish_reason=FinishReason.LENGTH,
            pool="p",
        )


@pytest.mark.row("P-27")
async def test_an_answer_of_another_version_than_was_asked_for_is_no_answer():
    """Each answer says which weights drew each token; one that was not asked for is refused, not trained on."""
    asked = request("a", PROMPT, max_tokens=1)
    for field in ({"exact_version": 7}, {"min_version": 7}):
        bound = replace(asked, **field)
        other = await Elsewhere(6).sample(bound)
        with pytest.raises(CompletionError, match=r"7 was asked|at least 7 asked"):
            check_completion(bound, other, owned_from=0)
    async with sampler(FakeEngine(), version=6, version_wait_s=0.0) as served:
        with pytest.raises(SamplerError, match="holds version 6"):
            await served.sample(bound)


@pytest.mark.row("P-28")
async def test_a_sampler_is_replaced_and_its_successor_has_the_newest_weights_without_the_trainer_doing_anything():
    """The trainer knows no sampler: a replacement fetches the newest version itself, and follows from there."""
    receivers = {"a": weights(0)}
    addresses = list(receivers)  # the mistake: whom to send to is known from the start
    receivers["b"] = weights(0)
    del receivers["a"]
    for address in addresses:
        if address in receivers:
            receivers[address] = weights(4)
    assert torch.equal(receivers["b"]["w0"], weights(0)["w0"])

    store = open_store("memory://")
    publisher = await open_publisher(store, lineage="l", anchor_share=2.0)
    router = SamplerRouter(patience_s=5.0)

    async def join(version):
        reader = follower(store)
        first = await reader.poll()
        assert first.version == version
        return reader, sampler(FakeEngine(), version=version)

    for version in range(3):
        await publisher.publish(version=version, step=version, tensors=weights(version))
    _, before = await join(2)
    async with before:
        router.add(before)
        assert (await router.sample(request("r1"))).versions[0].version == 2
    await publisher.publish(version=3, step=3, tensors=weights(3))
    reader, after = await join(3)
    async with after:
        router.add(after)
        assert (await router.sample(request("r2"))).versions[0].version == 3
        await publisher.publish(version=4, step=4, tensors=weights(4))
        staged = await reader.poll()
        await after.stage(staged)
        (status,) = await after.status()
        assert (status.version, status.held) == (4, held_digest(weights(4)))
        assert (await router.sample(request("r3"))).versions[0].version == 4


@pytest.mark.row("P-30")
async def test_publishing_needs_neither_rename_nor_fresh_listings():
    """On a store that fails calls, loses replies and lists late, the head always names a whole version."""
    clock = ManualClock()
    late = FaultyStore(open_store("memory://"), clock=clock, faults=Faults(list_lag=4))
    await publish(late, range(6), anchor_share=2.0)
    listed = [key for key in await late.list("weights/l/manifests/") if key.endswith(".json.zst")]
    # The mistake: a reader that takes the newest version that it sees in a listing.
    assert max(int(key.rsplit("/", 1)[1].partition("-")[0]) for key in listed) < 5
    assert (await follower(late).poll()).version == 5

    faults = Faults(fail=0.1, lost_reply=0.1, lost_swap=0.1, list_lag=8)
    seen = 0
    for seed in range(6):
        inner = open_store("memory://")
        store = FaultyStore(inner, clock=clock, faults=faults, seed=seed)
        store.faults = Faults()
        publisher = await open_publisher(store, lineage="l", anchor_share=2.0)
        store.faults = faults
        for version in range(12):
            for _ in range(50):
                try:
                    await publisher.publish(version=version, step=version, tensors=weights(version))
                    break
                except StoreError:
                    head = await read_head(inner)
                    if head is not None:
                        seen += 1
                        loaded = await load_head(inner, head)
                        assert loaded.version in (version - 1, version)
            staged = await follower(inner).poll()
            assert staged.version == version
            assert torch.equal(staged.tensors["w1"], weights(version)["w1"])
    assert seen > 20
