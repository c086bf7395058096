# pyright: basic, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""The embedded engine draws what the policy would, and records exactly what it drew from."""

import itertools

import numpy as np
import pytest
import torch
from sampling_kit import VOCAB, decoder, prompts, request, shape
from transformers import AutoModelForCausalLM

from etude.errors import ContextOverflowError, PolicyError, SamplerError
from etude.policy.digest import view_digest
from etude.policy.files import save_policy
from etude.sampling.engine import Forced
from etude.sampling.engines.torch_engine import TorchEngine
from etude.types import FinishReason


def finish(engine, requests=()):
    """Run to the end; returns answers by request id."""
    waiting, answers = list(requests), {}
    while waiting or engine.free_slots < engine.slots:
        while waiting and engine.free_slots:
            engine.admit(waiting.pop(0))
        answers |= {answer.request_id: answer for answer in engine.step()}
    return answers


def score(engine, token_ids, drawn_from, raw=(), **params):
    forced = Forced(token_ids=token_ids[drawn_from:], raw_draws=frozenset(raw))
    engine.admit(request("score", token_ids[:drawn_from], **({"top_k": 0, "top_p": 1.0} | params)), forced)
    return finish(engine)["score"]


def forced(made, answer, prompt, temperature=1.0):
    """Teacher-forced log-probabilities over the recorded supports, from a plain full forward."""
    tokens = torch.tensor([*prompt, *answer.token_ids])
    with torch.no_grad():
        hidden = made(tokens, torch.arange(len(tokens)), [0, len(tokens)]).hidden
        logits = (hidden @ made.head.T)[len(prompt) - 1 : -1] / temperature
    rows, counts = [], np.frombuffer(answer.support.counts, "<u2").astype(int)
    edges = np.concatenate(([0], np.cumsum(counts)))
    ids = np.frombuffer(answer.support.token_ids, "<u4").astype(np.int64)
    for row, (start, end) in enumerate(itertools.pairwise(edges)):
        rows.append(logits[row][ids[start:end]].log_softmax(-1).numpy())
    return rows, edges, ids


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_greedy_decoding_equals_transformers_token_for_token(model_type, tmp_path):
    made = decoder(shape(model_type, attention_bias=model_type == "qwen2"))
    save_policy(made, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=3, prefill_tokens=16)
    asked = prompts(5)
    answers = finish(engine, [request(str(i), p, temperature=0, max_tokens=24) for i, p in enumerate(asked)])
    for i, prompt in enumerate(asked):
        wanted = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        assert answers[str(i)].token_ids == tuple(wanted[0, len(prompt) :].tolist())


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_recorded_logprobs_are_those_of_a_plain_forward_over_the_recorded_support(model_type):
    made = decoder(shape(model_type))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=4, prefill_tokens=16)
    asked = prompts(6)
    answers = finish(
        engine,
        [request(str(i), p, temperature=0.8, top_k=20, top_p=0.9, max_tokens=30, seed=i) for i, p in enumerate(asked)],
    )
    for i, prompt in enumerate(asked):
        answer = answers[str(i)]
        rows, edges, ids = forced(made, answer, prompt, temperature=0.8)
        recorded = np.frombuffer(answer.support.logprobs, "<f4")
        drawn = np.frombuffer(answer.sampler_logprobs, "<f4")
        assert len(rows) == len(answer.token_ids) == 30
        for t, row in enumerate(rows):
            kept = ids[edges[t] : edges[t + 1]]
            stored = recorded[edges[t] : edges[t + 1]]
            assert (np.diff(kept) > 0).all()
            assert len(kept) <= 20
            assert np.exp(stored.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
            assert np.abs(stored - row).max() < 1e-4
            assert drawn[t] == stored[list(kept).index(answer.token_ids[t])]


def test_recorded_experts_are_those_the_policy_routes_to():
    made = decoder(shape("qwen3_moe"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=2, prefill_tokens=8)
    prompt = prompts(1, seed=3)[0]
    answer = finish(engine, [request("a", prompt, max_tokens=20)])["a"]
    experts = answer.experts
    ids = np.frombuffer(experts.expert_ids, "<u2").reshape(-1, experts.num_layers, experts.top_k).astype(np.int64)
    assert experts.start == 0
    assert experts.num_positions == len(ids) == len(prompt) + 20 - 1
    assert (np.diff(ids, axis=2) > 0).all()
    tokens = torch.tensor([*prompt, *answer.token_ids])[:-1]
    with torch.no_grad():
        replayed = made(
            tokens, torch.arange(len(tokens)), [0, len(tokens)], replay=torch.from_numpy(ids), plausibility=1.0
        )
    assert int(replayed.replaced) == 0


def test_a_seed_draws_the_same_tokens_whatever_else_is_in_the_batch():
    made = decoder(shape("qwen3_moe"))
    asked = prompts(12, seed=5)
    requests = [request(str(i), p, max_tokens=25, seed=i) for i, p in enumerate(asked)]
    alone = {}
    for one in requests:
        alone |= finish(TorchEngine(made.shape, made.hf_tensors(), max_batch=1), [one])
    together = finish(TorchEngine(made.shape, made.hf_tensors(), max_batch=7, prefill_tokens=20), requests[::-1])
    for name, answer in alone.items():
        assert together[name].token_ids == answer.token_ids
        np.testing.assert_allclose(
            np.frombuffer(together[name].sampler_logprobs, "<f4"),
            np.frombuffer(answer.sampler_logprobs, "<f4"),
            atol=1e-4,
        )


def test_the_next_turn_of_a_session_computes_only_its_tail_and_draws_the_same():
    made = decoder(shape("qwen3_moe"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=4)
    first = prompts(1, seed=7)[0]
    answer = finish(engine, [request("a", first, session="s", max_tokens=10)])["a"]
    second = (*first, *answer.token_ids, 5, 6, 7)
    reused = finish(engine, [request("b", second, session="s", max_tokens=10)])["b"]
    fresh = finish(engine, [request("c", second, session="other", max_tokens=10)])["c"]
    assert reused.cached_tokens == reused.experts.start == len(first) + 10 - 1
    assert (fresh.cached_tokens, fresh.experts.start) == (0, 0)
    assert reused.token_ids == fresh.token_ids
    assert fresh.experts.expert_ids.endswith(reused.experts.expert_ids)


def test_keys_and_values_are_never_reused_across_weights():
    made, other = decoder(shape("llama")), decoder(shape("llama"), seed=1)
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=2)
    first = prompts(1, seed=9)[0]
    parked = finish(engine, [request("a", first, session="s", max_tokens=6)])["a"]
    engine.admit(request("b", first, session="t", max_tokens=6))
    engine.step()
    assert engine.stage(other.hf_tensors())() == {"b": 1}
    mixed = finish(engine)["b"]
    after_parked = finish(engine, [request("c", (*first, *parked.token_ids, 1), session="s")])["c"]
    after_mixed = finish(engine, [request("d", (*first, *mixed.token_ids, 1), session="t")])["d"]
    assert (after_parked.cached_tokens, after_mixed.cached_tokens) == (0, 0)
    alone = TorchEngine(other.shape, other.hf_tensors(), max_batch=1)
    wanted = finish(alone, [request("c", (*first, *parked.token_ids, 1))])["c"]
    assert after_parked.token_ids == wanted.token_ids


def test_a_stop_token_ends_the_answer_and_is_its_last():
    made = decoder(shape("llama"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1)
    free = finish(engine, [request("a", (1, 2, 3), session="x", max_tokens=20)])["a"]
    stop = free.token_ids[7]
    answer = finish(engine, [request("b", (1, 2, 3), session="y", max_tokens=20, stop_token_ids=(stop,))])["b"]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_an_answer_ends_where_the_context_does():
    made = decoder(shape("llama"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1, max_context=32)
    answer = finish(engine, [request("a", range(30), max_tokens=20)])["a"]
    assert (len(answer.token_ids), answer.finish_reason) == (2, FinishReason.LENGTH)
    with pytest.raises(ContextOverflowError, match="32 tokens leaves no room in a context of 32"):
        engine.admit(request("b", range(32)))


@pytest.mark.parametrize("prompt", [(), (VOCAB,), (-1,)])
def test_a_prompt_that_is_no_prompt_is_refused(prompt):
    made = decoder(shape("llama"))
    with pytest.raises(SamplerError, match="prompt_ids"):
        TorchEngine(made.shape, made.hf_tensors(), max_batch=1).admit(request("a", prompt))


def test_logits_that_are_not_numbers_fail_the_request_and_never_become_a_token():
    made = decoder(shape("llama"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=2)
    engine.admit(request("a", (1, 2), max_tokens=8))
    engine.step()
    damaged = {name: tensor.clone() for name, tensor in made.hf_tensors().items()}
    damaged["model.norm.weight"][0] = float("nan")
    engine.stage(damaged)()
    (answer,) = engine.step()
    assert "not finite" in answer.failure
    assert answer.token_ids == ()
    engine.stage(made.hf_tensors())()
    assert len(finish(engine, [request("b", (1, 2), max_tokens=8)])["b"].token_ids) == 8


def test_a_cancelled_request_returns_what_it_drew_and_leaves_the_others_alone():
    made = decoder(shape("qwen3_moe"))
    asked = prompts(4, seed=11)
    requests = [request(str(i), p, max_tokens=20, seed=i) for i, p in enumerate(asked)]
    wanted = finish(TorchEngine(made.shape, made.hf_tensors(), max_batch=4), requests)
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=4)
    for one in requests:
        engine.admit(one)
    for _ in range(5):
        engine.step()
    cut = engine.cancel("0")
    assert (cut.finish_reason, cut.token_ids) == (FinishReason.CANCELLED, wanted["0"].token_ids[:5])
    assert engine.cancel("0") is None
    answers = finish(engine)
    assert {name: answer.token_ids for name, answer in answers.items()} == {
        name: wanted[name].token_ids for name in ("1", "2", "3")
    }


def test_weights_of_another_shape_are_refused_before_anything_changes():
    made = decoder(shape("llama"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1)
    tensors = made.hf_tensors()
    del tensors["model.norm.weight"]
    with pytest.raises(PolicyError, match=r"model\.norm\.weight"):
        engine.stage(tensors)


@pytest.mark.parametrize("view", ["bf16", "fp8"])
def test_a_view_rounds_the_weights_and_still_draws_what_it_records(view):
    made = decoder(shape("qwen3_moe"))
    exact = TorchEngine(made.shape, made.hf_tensors(), max_batch=1)
    rounded = TorchEngine(made.shape, made.hf_tensors(), max_batch=1, view=view)
    prompt = prompts(1, seed=13)[0]
    a, b = (np.frombuffer(score(engine, prompt, 1).sampler_logprobs, "<f4") for engine in (exact, rounded))
    assert 0 < np.abs(a - b).max() < 1.0
    answer = finish(rounded, [request("a", prompt, max_tokens=5)])["a"]
    assert np.isfinite(np.frombuffer(answer.sampler_logprobs, "<f4")).all()


@pytest.mark.parametrize("top_k", [0, 20])
def test_scoring_what_was_drawn_gives_what_was_recorded(top_k):
    made = decoder(shape("qwen3_moe"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=3, prefill_tokens=16)
    params = {"temperature": 0.8, "top_k": top_k, "top_p": 0.9 if top_k else 1.0}
    prompt = prompts(1, seed=21)[0]
    drawn = finish(engine, [request("a", prompt, session="a", max_tokens=30, **params)])["a"]
    engine.admit(request("b", prompts(1, seed=22)[0], max_tokens=20))
    scored = score(engine, (*prompt, *drawn.token_ids), len(prompt), raw=(0, 29), **params)
    assert scored.token_ids == drawn.token_ids
    np.testing.assert_allclose(
        np.frombuffer(scored.sampler_logprobs, "<f4"), np.frombuffer(drawn.sampler_logprobs, "<f4"), atol=1e-5
    )
    assert scored.experts == drawn.experts
    if top_k:
        assert (scored.support.counts, scored.support.token_ids) == (drawn.support.counts, drawn.support.token_ids)
    raw = np.frombuffer(scored.raw, "<f4").reshape(2, VOCAB)
    tokens = torch.tensor([*prompt, *drawn.token_ids])
    with torch.no_grad():
        hidden = made(tokens, torch.arange(len(tokens)), [0, len(tokens)]).hidden
        wanted = (hidden @ made.head.T).log_softmax(-1)[[len(prompt) - 1, len(tokens) - 2]]
    np.testing.assert_allclose(raw, wanted, atol=1e-4)


def test_a_given_token_outside_of_the_support_has_no_probability():
    made = decoder(shape("llama"))
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1)
    prompt = prompts(1, seed=23)[0]
    best = finish(engine, [request("a", prompt, temperature=0, max_tokens=1)])["a"].token_ids[0]
    scored = score(engine, (*prompt, (best + 1) % VOCAB, best), len(prompt), temperature=1.0, top_k=1, top_p=1.0)
    assert np.frombuffer(scored.sampler_logprobs, "<f4")[0] == -np.inf
    assert np.frombuffer(scored.support.token_ids, "<u4")[0] == best


@pytest.mark.parametrize("view", ["fp32", "bf16", "fp8"])
def test_the_held_digest_is_of_the_view_and_moves_with_the_weights(view):
    made, other = decoder(shape("qwen3_moe")), decoder(shape("qwen3_moe"), seed=1)
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1, view=view)
    assert engine.held_digest() == view_digest(made.hf_tensors(), view)
    engine.stage(other.hf_tensors())()
    assert engine.held_digest() == view_digest(other.hf_tensors(), view) != view_digest(made.hf_tensors(), view)


def test_a_commit_points_to_weights_that_nobody_else_writes_to():
    made, other = decoder(shape("qwen3_moe")), decoder(shape("qwen3_moe"), seed=1)
    engine = TorchEngine(made.shape, made.hf_tensors(), max_batch=1)
    handed = {name: tensor.clone() for name, tensor in other.hf_tensors().items()}
    commit = engine.stage(handed)
    prompt = prompts(1, seed=31)[0]
    before = finish(engine, [request("a", prompt, max_tokens=8, temperature=0)])["a"]
    with torch.no_grad():
        for tensor in handed.values():
            tensor.zero_()
    commit()
    after = finish(engine, [request("b", prompt, max_tokens=8, temperature=0)])["b"]
    for answer, policy in ((before, made), (after, other)):
        fresh = TorchEngine(policy.shape, policy.hf_tensors(), max_batch=1)
        wanted = finish(fresh, [request("a", prompt, max_tokens=8, temperature=0)])["a"]
        assert (answer.token_ids, answer.sampler_logprobs) == (wanted.token_ids, wanted.sampler_logprobs)
