# pyright: basic, reportOptionalMemberAccess=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""A sampler serves only if it computes what the trainer computes, and only for as long as it does."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
from msgspec.structs import replace

from etude.config import PoolSection, RunConfig
from etude.errors import RunError, SamplerError
from etude.gateway.doubles import byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.policy.digest import held_digest
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.runtime.canaries import Canaries
from etude.runtime.drift import Drift
from etude.runtime.probe_text import probe_text
from etude.runtime.probes import Prober
from etude.sampling.decode_loop import Held
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.faulty import EngineFaults, FaultyEngine
from etude.sampling.sampler import EngineSampler
from etude.telemetry.doubles import MemoryLedger
from etude.training.records import TrainerStatus
from etude.training.scoring import score
from etude.weight_types import Head

RENDERER = ChatMLRenderer(byte_tokenizer())
TEXT = probe_text(RENDERER)
VOCAB = byte_tokenizer().get_vocab_size()
SHAPE = PolicyShape(
    model_type="qwen3_moe", vocab_size=VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, qk_norm=True,
    ffn_hidden=0, experts=4, experts_per_token=2, expert_hidden=16, norm_topk=True, max_context=160,
)  # fmt: skip


def policy(seed):
    made = random_policy(SHAPE, seed=seed)
    with torch.no_grad():
        for name, tensor in made.hf_tensors().items():
            if not name.endswith("norm.weight"):
                tensor.mul_(8)  # far from uniform, so that a wrong token shows
    return made


POLICY, NEXT = policy(0), policy(1)
SOUND = EngineFaults()


class Trainer:
    """Scores like the trainer's service, with a policy in this process."""

    def __init__(self, decoder=POLICY, version=0):
        self.decoder, self.version = decoder, version
        self.replays = True
        self.scores = 0

    async def health(self):
        return TrainerStatus(step=self.version, version=self.version, pending_groups=0, pending_tokens=0)

    async def score(self, request):
        self.scores += 1
        if not self.replays:
            return score(self.decoder, replace(request, experts=None), version=self.version)
        return score(self.decoder, request, version=self.version)


class Weights:
    lineage = "l"

    def __init__(self, decoder, version):
        self.version, self.tensors = version, decoder.hf_tensors()
        self.digest = held_digest(self.tensors)


@asynccontextmanager
async def served(faults=SOUND, *, view="fp32", decoder=POLICY):
    inner = TorchEngine(SHAPE, decoder.hf_tensors(), view=view, max_batch=4)
    engine = FaultyEngine(inner, faults, held=decoder.hf_tensors())
    held = Held(lineage="l", version=0, digest=held_digest(POLICY.hf_tensors()))
    async with EngineSampler(engine, sampler_id="a-0", pool="a", view=view, held=held) as sampler:
        yield sampler


def config(view="fp32", **fields):
    return RunConfig(pools=(PoolSection(name="a", view=view),), **fields)


def prober(trainer, view="fp32", ledger=None):
    return Prober(TEXT, config(view), trainer=lambda: trainer, ledger=ledger or MemoryLedger(), again_s=0.0)


@pytest.mark.parametrize("view", ["fp32", "bf16", "fp8"])
async def test_a_sound_sampler_of_every_view_is_proven_and_the_ledger_says_how_well(view):
    ledger = MemoryLedger()
    async with served(view=view) as sampler:
        await prober(Trainer(), view, ledger).prove("a-0", sampler)
    (probed,) = ledger.events
    assert (probed.sampler, probed.lineage, probed.version) == ("a-0", "l", 0)
    assert 0 < probed.max_error < {"fp32": 1e-4, "bf16": 1.0, "fp8": 4.0}[view]
    assert probed.experts_equal == 1.0 if view == "fp32" else probed.experts_equal > 0.8


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (EngineFaults(shift=1), "shifted: each is that of the token before"),
        (EngineFaults(shift=-1), "shifted: each is that of the token after"),
        (EngineFaults(temperature_ignored=True), r"does not apply the temperature \(0\.7\)"),
    ],
)
@pytest.mark.parametrize("view", ["fp32", "fp8"])
async def test_a_mistake_is_named_with_the_first_token_that_differs(faults, reason, view):
    async with served(faults, view=view) as sampler:
        with pytest.raises(SamplerError, match=rf"{reason}.*position \d+, id \d+ \('.*'\): sampler -\d"):
            await prober(Trainer(), view).prove("a-0", sampler)


async def test_a_sampler_with_other_weights_than_it_claims_never_serves():
    async with served(decoder=NEXT) as sampler:
        with pytest.raises(SamplerError, match="its engine holds"):
            await prober(Trainer()).prove("a-0", sampler)
    async with served(decoder=NEXT, view="bf16") as sampler:
        with pytest.raises(SamplerError, match="are not the trainer's: position"):
            await prober(Trainer(), "bf16").prove("a-0", sampler)


async def test_a_trainer_that_does_not_replay_the_experts_is_noticed():
    trainer = Trainer()
    trainer.replays = False
    async with served(view="fp8") as sampler:
        with pytest.raises(SamplerError, match=r"used only .*% of the experts"):
            await prober(trainer, "fp8").prove("a-0", sampler)


async def test_a_sampler_waits_for_the_trainer_to_be_at_its_version():
    class Late(Trainer):
        async def score(self, request):
            self.version = 0 if self.scores else 5
            if self.scores == 1:
                self.scores += 1
                raise RunError("the trainer is being started anew")
            return await super().score(request)

    trainer = Late()
    async with served() as sampler:
        await prober(trainer).prove("a-0", sampler)
    assert trainer.scores > 3


class Roster:
    """Samplers in service, and what was said of those that were put out of it."""

    def __init__(self, **samplers):
        self.samplers = samplers
        self.quarantined = {}

    def serving(self):
        return {name: sampler for name, sampler in self.samplers.items() if name not in self.quarantined}

    def quarantine(self, name, reason):
        self.quarantined[name] = reason


def canaries(trainer, roster, *, notes=None, view="fp32"):
    async def head():
        return Head(lineage="l", version=trainer.version, digest="", anchor=0)

    return Canaries(
        TEXT, config(view), trainer=lambda: trainer, samplers=roster, read_head=head, note=(notes or []).append
    )


async def looks(canaries, count=4):
    for _ in range(count):
        await canaries.look()


async def test_a_sampler_that_follows_is_looked_at_once_per_version():
    trainer = Trainer()
    async with served() as sampler:
        roster = Roster(a=sampler)
        watch = canaries(trainer, roster)
        await looks(watch)
        trainer.decoder, trainer.version = NEXT, 1
        await looks(watch)
        await sampler.stage(Weights(NEXT, 1))
        await looks(watch)
    assert (roster.quarantined, trainer.scores) == ({}, 2)
    assert 0 < watch.metrics()["probe/gap_nats/a"] < 1e-4


async def test_one_of_two_samplers_that_computes_something_else_is_quarantined_and_the_other_serves():
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(served(view="fp8"))
        engine = EngineFaults(lost_tensors=("lm_head.weight", "model.embed_tokens.weight"))
        bad = await stack.enter_async_context(served(engine, view="fp8"))
        roster = Roster(good=good, bad=bad)
        trainer = Trainer(NEXT, 1)
        watch = canaries(trainer, roster, view="fp8")
        for sampler in (good, bad):
            await sampler.stage(Weights(NEXT, 1))
        (status,) = await bad.status()
        assert "an update was lost" in status.fault
        bad._loop.fault = ""  # a sampler that does not look at its own memory
        await looks(watch)
    assert list(roster.quarantined) == ["bad"]
    assert "good holds" in roster.quarantined["bad"]


async def test_a_canary_that_is_off_is_quarantined_even_if_every_digest_is_right():
    async with served(EngineFaults(shift=1)) as sampler:
        roster = Roster(a=sampler)
        await looks(canaries(Trainer(), roster))
    assert "shifted" in roster.quarantined["a"]


async def test_a_trainer_that_is_down_or_repeats_steps_puts_nobody_out_of_service():
    class Down(Trainer):
        async def health(self):
            raise RunError("gone")

    async with served() as sampler:
        for trainer in (Down(NEXT), Trainer(NEXT, 0)):
            roster = Roster(a=sampler)
            watch = canaries(trainer, roster)

            async def ahead():
                return Head(lineage="l", version=7, digest="", anchor=0)

            watch._read_head = ahead
            await looks(watch)
            assert roster.quarantined == {}


async def test_a_gap_that_grows_is_told_and_a_level_is_not():
    steady, growing, noisy = Drift(), Drift(), Drift()
    generator = torch.Generator().manual_seed(0)
    noise = (torch.rand(40, generator=generator) * 0.02).tolist()
    assert not any(steady.add(n, 0.3 + 0.1 * noise[n]) for n in range(40))
    assert not any(noisy.add(n, noise[n]) for n in range(40))
    assert any(growing.add(n, 0.011 + 0.025 * n / 30 + 0.1 * noise[n]) for n in range(30))
    assert growing.slope == pytest.approx(0.025 / 30, rel=0.3)


def test_the_fixed_text_is_the_same_for_the_same_renderer_and_fits_the_context():
    again = probe_text(ChatMLRenderer(byte_tokenizer()))
    assert (again.token_ids, again.drawn_from) == (TEXT.token_ids, TEXT.drawn_from)
    short = TEXT.short()
    assert len(short.token_ids) - short.drawn_from == 12
    fitted = TEXT.fit(60)
    assert (fitted.token_ids, fitted.drawn_from) == (TEXT.token_ids[-60:], 12)
    assert (len(TEXT.fit(20).token_ids), TEXT.fit(20).drawn_from) == (20, 1)


@pytest.mark.parametrize("style", ["chatml", "chatml-compact"])
def test_a_renderer_that_keeps_its_word_is_accepted(style):
    assert probe_text(ChatMLRenderer(byte_tokenizer(), style)).drawn_from > 1


class Reformatting(ChatMLRenderer):
    """Gives tool calls back in another spelling."""

    def parse(self, token_ids):
        message = super().parse(token_ids)
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = call["function"]["arguments"].replace(": ", ":")
        return message


class Forgetful(ChatMLRenderer):
    """Drops what was said before the last turn, as templates that strip earlier reasoning do."""

    def render(self, messages, tools):
        return super().render(messages[-2:], tools)


@pytest.mark.parametrize(("kind", "reason"), [(Reformatting, "comes back as"), (Forgetful, "changes token")])
def test_a_renderer_that_changes_what_was_drawn_is_refused(kind, reason):
    with pytest.raises(RunError, match=reason):
        probe_text(kind(byte_tokenizer()))
