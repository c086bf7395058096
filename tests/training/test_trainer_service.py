# pyright: basic, reportAttributeAccessIssue=false
import threading

import pytest

from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.config import SamplingSection
from etude.errors import HostError, IntegrityError, RunError, TrainerLostError
from etude.learning_config import AlgorithmSection, TrainerSection
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.telemetry.doubles import MemoryLedger
from etude.training.checkpoint import OPTIMIZER_FILE
from etude.training.client import TrainerClient
from etude.training.records import PublishRequest, RestoreRequest, StepRequest
from etude.training.service import TrainerService
from etude.training.trainer import Trainer, TrainerPlan
from etude.weight_types import Head

SHAPE = PolicyShape(
    model_type="qwen3", vocab_size=64, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_hidden=32,
    qk_norm=True,
)  # fmt: skip


class RecordingPublisher:
    """Remembers what was published; the version under way ends when `release` is set."""

    def __init__(self):
        self.started = []
        self.release = threading.Event()
        self.release.set()
        self.failure: RunError | None = None

    def start(self, *, version, step, tensors):
        self.join()
        self.started.append((version, step, {name: tensor.clone() for name, tensor in tensors.items()}))
        return {"weights/publish_wait_s": 0.25}

    def join(self):
        assert self.release.wait(10)
        if self.failure:
            raise self.failure

    def is_head(self, *, version, tensors):
        return bool(self.started) and self.started[-1][0] == version

    def settle(self, *, version, step, tensors, fork=""):
        self.start(version=version, step=step, tensors=tensors)
        return Head(lineage="0001-a", version=version, digest="d", anchor=0), fork


class Served:
    """A trainer's service and a client of it."""

    async def __aenter__(self):
        plan = TrainerPlan(AlgorithmSection(), TrainerSection(), SamplingSection(), group_size=4)
        self.trainer = Trainer(random_policy(SHAPE, seed=0), plan)
        self.publisher = RecordingPublisher()
        self.saved = {}
        self.ledger = MemoryLedger()
        self.service = self.make_service()
        await self.service.start()
        self.url = f"http://127.0.0.1:{self.service.port}"
        self.client = await TrainerClient(self.url).__aenter__()
        return self

    def make_service(self):
        return TrainerService(
            self.trainer,
            publisher=self.publisher,
            save_checkpoint=self.saved.__setitem__,
            load_checkpoint=self.saved.__getitem__,
            ledger=self.ledger,
        )

    async def __aexit__(self, *_):
        await self.client.__aexit__(None, None, None)
        await self.service.stop()


async def test_groups_go_in_and_published_versions_come_out():
    async with Served() as served:
        counted = await served.client.forward_backward([synthetic_group(GroupPlan(), 1)])
        assert counted.tokens_trained == counted.tokens_drawn > 0
        await served.client.forward_backward([synthetic_group(GroupPlan(), 2)])
        assert (await served.client.health()).pending_groups == 2
        report = await served.client.optim_step()
        assert report.metrics["weights/publish_wait_s"] == 0.25
        assert (report.version, report.num_groups) == (1, 2)
        version, step, tensors = served.publisher.started[-1]
        assert (version, step) == (1, 1)
        assert tensors.keys() == served.trainer.tensors().keys()
        files = await served.client.checkpoint()
        assert list(served.saved) == [1]
        assert {name: file.num_bytes for name, file in files.items()} == {
            name: len(data) for name, data in served.saved[1].items()
        }


async def test_the_next_step_goes_on_while_a_version_is_being_published():
    async with Served() as served:
        await served.client.forward_backward([synthetic_group(GroupPlan(), 1)])
        await served.client.optim_step()
        served.publisher.release.clear()
        await served.client.forward_backward([synthetic_group(GroupPlan(), 2)])
        assert (await served.client.health()).pending_groups == 1
        served.publisher.release.set()
        assert (await served.client.optim_step()).version == 2


async def test_a_version_is_published_without_a_step_where_the_controller_says():
    async with Served() as served:
        settled = await served.client.publish(PublishRequest(fork="the disk was lost"))
        assert (settled.lineage, settled.version, settled.opened) == ("0001-a", 0, "the disk was lost")
        assert [started[:2] for started in served.publisher.started] == [(0, 0)]
        assert (await served.client.compare()).is_head


async def test_the_ledger_has_each_groups_tokens_before_the_caller_knows_of_the_step():
    async with Served() as served:
        groups = [synthetic_group(GroupPlan(), seed) for seed in (1, 2)]
        drawn = [(await served.client.forward_backward([group])).tokens_drawn for group in groups]
        await served.client.optim_step(StepRequest(publish=False, replayed=True, lineage="0001-a"))
        [trained] = served.ledger.events
        assert (trained.version, trained.step, trained.lineage, trained.replayed) == (1, 1, "0001-a", True)
        assert [group.group for group in trained.groups] == [group.group_id for group in groups]
        assert [group.drawn for group in trained.groups] == drawn
        for group in trained.groups:
            assert group.drawn == group.trained + sum(group.masked.values()) + sum(group.dropped.values())
        assert not served.publisher.started


async def test_a_trainer_goes_back_to_a_checkpoint_whatever_it_did_since():
    async with Served() as served:
        await served.client.forward_backward([synthetic_group(GroupPlan(), 1)])
        await served.client.optim_step()
        files = await served.client.checkpoint()
        digests = {name: file.digest for name, file in files.items()}
        await served.client.forward_backward([synthetic_group(GroupPlan(), 2)])
        await served.client.optim_step()
        await served.client.forward_backward([synthetic_group(GroupPlan(), 3)])
        await served.client.restore(RestoreRequest(step=1, digests=digests))
        status = await served.client.health()
        assert (status.step, status.version, status.pending_groups) == (1, 1, 0)
        assert (await served.client.checkpoint()) == files


async def test_a_damaged_checkpoint_is_told_from_other_refusals():
    async with Served() as served:
        await served.client.forward_backward([synthetic_group(GroupPlan(), 1)])
        await served.client.optim_step()
        files = await served.client.checkpoint()
        digests = {name: file.digest for name, file in files.items()}
        served.saved[1] = served.saved[1] | {OPTIMIZER_FILE: b"half"}
        with pytest.raises(IntegrityError, match=OPTIMIZER_FILE):
            await served.client.restore(RestoreRequest(step=1, digests=digests))
        with pytest.raises(RunError, match="cannot go back to the start"):
            await served.client.restore(RestoreRequest(step=0, digests={}))


async def test_refusals_reach_the_caller_with_their_reason():
    async with Served() as served:
        with pytest.raises(RunError, match="no token to train on"):
            await served.client.optim_step()
        group = synthetic_group(GroupPlan(), 1)
        await served.client.forward_backward([group])
        with pytest.raises(RunError, match="twice"):
            await served.client.forward_backward([group])


async def test_a_version_that_could_not_be_published_ends_the_run_with_its_reason():
    async with Served() as served:
        await served.client.forward_backward([synthetic_group(GroupPlan(), 1)])
        served.publisher.failure = RunError("the store is full")
        with pytest.raises(RunError, match="the store is full"):
            await served.client.optim_step()
        served.publisher.failure = None


async def test_a_trainer_that_is_not_there_is_an_error_with_its_address():
    async with Served() as served:
        url = served.url
        with pytest.raises(HostError, match="choose another port"):
            await served.make_service().start(served.service.port)
    async with TrainerClient(url) as client:
        with pytest.raises(TrainerLostError, match=r"did not answer /health"):
            await client.health()
