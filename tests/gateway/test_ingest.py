# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
import math
import struct

import pytest
from msgspec.structs import replace

from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.ingest import CompletionError, check_completion
from etude.types import Experts, FinishReason, SampleRequest, SamplingParams, Support, VersionRun

REQUEST = SampleRequest(
    request_id="r", session_id="s", prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4, stop_token_ids=(7,))
)


def pack(kind, *values):
    return struct.pack(f"<{len(values)}{kind}", *values)


HALF = math.log(0.5)
SUPPORT = Support(counts=pack("H", 2, 0), token_ids=pack("I", 5, 6), logprobs=pack("f", math.log(0.75), math.log(0.25)))
EXPERTS = Experts(start=2, num_layers=1, top_k=1, expert_ids=pack("H", 0, 0))


async def drawn():
    completion = await ScriptedSampler([[5, 7]], tokenizer=byte_tokenizer()).sample(REQUEST)
    return replace(completion, support=SUPPORT, experts=EXPERTS)


async def test_a_consistent_completion_passes():
    check_completion(REQUEST, await drawn(), owned_from=2)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("empty", {"token_ids": ()}),
        ("too_long", {"token_ids": (5, 5, 5, 5, 7)}),
        ("token_ids", {"token_ids": (-1, 7)}),
        ("finish", {"token_ids": (5, 8)}),
        ("logprobs_length", {"sampler_logprobs": pack("f", -1.0)}),
        ("logprobs_length", {"sampler_logprobs": pack("f", -1.0, -1.0) + b"x"}),
        ("logprobs_range", {"sampler_logprobs": pack("f", 0.5, -1.0)}),
        ("logprobs_range", {"sampler_logprobs": pack("f", math.nan, -1.0)}),
        ("logprobs_range", {"sampler_logprobs": pack("f", -math.inf, -1.0)}),
        ("versions_count", {"versions": ()}),
        ("versions_count", {"versions": (VersionRun(1, 1),)}),
        ("versions_count", {"versions": (VersionRun(1, 0), VersionRun(2, 2))}),
        ("versions_order", {"versions": (VersionRun(2, 1), VersionRun(1, 1))}),
        ("versions_order", {"versions": (VersionRun(-1, 2),)}),
        ("support_length", {"support": replace(SUPPORT, counts=pack("H", 2))}),
        ("support_length", {"support": replace(SUPPORT, counts=pack("H", 2, 1))}),
        ("support_order", {"support": replace(SUPPORT, token_ids=pack("I", 6, 5))}),
        ("support_order", {"support": replace(SUPPORT, token_ids=pack("I", 5, 5))}),
        ("support_mass", {"support": replace(SUPPORT, logprobs=pack("f", HALF, math.log(0.49)))}),
        ("support_mass", {"support": replace(SUPPORT, logprobs=pack("f", math.nan, HALF))}),
        ("support_mass", {"support": replace(SUPPORT, logprobs=pack("f", 1e9, HALF))}),
        ("support_token", {"support": replace(SUPPORT, token_ids=pack("I", 6, 8))}),
        ("support_token", {"support": replace(SUPPORT, logprobs=pack("f", HALF, HALF))}),
        ("experts_shape", {"experts": replace(EXPERTS, num_layers=0)}),
        ("experts_start", {"experts": replace(EXPERTS, start=3)}),
        ("experts_length", {"experts": replace(EXPERTS, start=1)}),
    ],
)
async def test_each_violation_is_named(reason, changes):
    with pytest.raises(CompletionError) as caught:
        check_completion(REQUEST, replace(await drawn(), **changes), owned_from=2)
    assert caught.value.reason == reason


async def test_a_version_that_was_not_asked_for_is_a_violation():
    two_versions = replace(await drawn(), versions=(VersionRun(3, 1), VersionRun(4, 1)))
    check_completion(replace(REQUEST, min_version=3), two_versions, owned_from=2)
    for request in (replace(REQUEST, min_version=4), replace(REQUEST, exact_version=3)):
        with pytest.raises(CompletionError) as caught:
            check_completion(request, two_versions, owned_from=2)
        assert caught.value.reason == "version_unasked"


async def test_a_completion_cut_short_needs_no_stop_token():
    cut = replace(await drawn(), token_ids=(5, 8), finish_reason=FinishReason.LENGTH)
    check_completion(REQUEST, cut, owned_from=2)
