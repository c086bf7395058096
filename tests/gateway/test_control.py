# pyright: basic, reportArgumentType=false
"""The control API as an orchestrator of somebody else uses it: over HTTP, with the admin key."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from etude.errors import VersionUnavailableError
from etude.gateway.control import ControlApi
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer

ADMIN = "an-admin-key-of-somebody"
USER = {"role": "user", "content": "fix it"}


class Orchestrator:
    def __init__(self, served, control, client):
        self.served, self.control, self.client = served, control, client

    async def ask(self, method, path, body=None, headers=None):
        url = f"http://127.0.0.1:{self.control.port}{path}"
        async with self.client.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def call(self, key, *messages, path="/v1/chat/completions", **fields):
        """Ask for a completion as a harness with this key does."""
        url = f"http://127.0.0.1:{self.served.gateway.port}{path}"
        body = {"messages": list(messages), **fields}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.client.post(url, json=body, headers=headers) as response:
            return response.status, response.headers, await response.json()


class UpdatedSampler:
    """Draws with its version, and remembers by its id what it drew for a request, as etude's own do."""

    def __init__(self, version):
        self.version = version
        self.drawn = {}
        self.asked = []

    async def sample(self, request):
        self.asked.append(request)
        if self.version < (request.min_version or 0) or request.exact_version not in (None, self.version):
            raise VersionUnavailableError(f"{request.request_id}: version {self.version} is here")
        if request.request_id not in self.drawn:
            drawing = ScriptedSampler(["a"], tokenizer=byte_tokenizer(), version=self.version)
            self.drawn[request.request_id] = await drawing.sample(request)
        return self.drawn[request.request_id]

    async def status(self):
        return []


@pytest.fixture
def orchestrate(serve):
    @asynccontextmanager
    async def orchestrating(answers=(), **options):
        async with serve(answers, **options) as served:
            control = ControlApi(served.gateway, admin_key=ADMIN, keep_closed=2)
            await control.start()
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as client:
                yield Orchestrator(served, control, client)
            await control.stop()

    return orchestrating


async def test_a_session_is_opened_played_rewarded_and_read_back(orchestrate):
    async with orchestrate(["a", "b"]) as user:
        told = {"session_id": "t-1", "task_id": "t", "group_id": "g", "sample_index": 1, "metadata": {"k": [1]}}
        status, opened = await user.ask("POST", "/sessions", told | {"sampling": {"max_tokens": 9, "top_k": 5}})
        assert (status, opened["capture_level"], opened["rollout_type"]) == (200, "tokens", "train")
        assert opened["base_url"].endswith("/v1")
        _, _, first = await user.call(opened["api_key"], USER)
        answer = first["choices"][0]["message"]
        _, summary = await user.ask("GET", "/sessions/t-1")
        assert (summary["status"], summary["num_calls"], summary["task_id"]) == ("open", 1, "t")
        await user.call(opened["api_key"], USER, answer, USER)
        assert (await user.ask("POST", "/sessions/t-1/reward", {"reward": 0.5, "components": {"tests": 1}}))[0] == 200
        assert (await user.ask("POST", "/sessions/t-1/close"))[1]["status"] == "closed"
        status, _, refused = await user.call(opened["api_key"], USER)
        assert (status, refused["error"]["code"]) == (404, "session_closed")
        _, rollout = await user.ask("GET", "/sessions/t-1/rollout")
        _, trace = await user.ask("GET", "/sessions/t-1/trace_entries")
    assert (rollout["reward"], rollout["components"], rollout["metadata"]) == (0.5, {"tests": 1.0}, {"k": [1]})
    assert [node["parent"] for node in rollout["nodes"]] == [None, "n0"]
    one, two = user.served.sampler.requests
    assert (one.params.max_tokens, one.params.top_k) == (9, 5)
    assert [tuple(entry["prompt_token_ids"]) for entry in trace["entries"]] == [one.prompt_ids, two.prompt_ids]
    for entry, node in zip(trace["entries"], rollout["nodes"], strict=True):
        drawn = entry["completion_token_ids"]
        assert drawn == node["completion_token_ids"]
        assert entry["loss_mask"] == [0] * len(entry["prompt_token_ids"]) + [1] * len(drawn)
        assert entry["per_token_logps"] == pytest.approx([-0.28768] * len(drawn), abs=1e-4)
        assert entry["node_id"] == node["node_id"]
        assert entry["metadata"]["sampling"] == {"temperature": 1.0, "top_p": 0.97, "top_k": 5}


async def test_the_trace_to_train_on_leaves_out_what_the_tree_calls_replaced(orchestrate):
    """One rule for the control API, for `etude show --trace` and for training."""
    async with orchestrate(["a", "b", "c"]) as user:
        _, opened = await user.ask("POST", "/sessions", {"session_id": "t-1"})
        await user.call(opened["api_key"], USER)
        _, _, second = await user.call(opened["api_key"], USER)
        await user.call(opened["api_key"], USER, second["choices"][0]["message"], USER)
        _, rollout = await user.ask("GET", "/sessions/t-1/rollout")
        _, trace = await user.ask("GET", "/sessions/t-1/trace_entries")
    assert [(node["node_id"], node["edge"], node["link"]) for node in rollout["nodes"]] == [
        ("n0", "root", None),
        ("n1", "retry", "n0"),
        ("n2", "continuation", None),
    ]
    assert [turn["node_id"] for turn in trace["entries"]] == ["n1", "n2"]


async def test_only_the_admin_key_opens_anything_and_no_session_key_does(orchestrate):
    async with orchestrate() as user:
        for key in ("", "Bearer", "Bearer nonsense", f"Bearer {user.served.key}", f"Basic {ADMIN}"):
            status, body = await user.ask("GET", "/sessions", headers={"Authorization": key})
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        headers = {"Authorization": "", "x-api-key": ADMIN}
        assert (await user.ask("GET", "/sessions", headers=headers))[0] == 200
        assert (await user.ask("GET", "/health", headers={"Authorization": ""}))[0] == 200
        status, _, _ = await user.call(ADMIN, USER)
        assert status == 401, "the admin key is nobody's session"


@pytest.mark.parametrize(
    "body",
    [
        {"sampling": {"n": 2}},
        {"sampling": {"presence_penalty": 1.0}},
        {"sampling": {"temperature": -1}},
        {"purpose": "play"},
        {"session_id": "a/b"},
        {"session_id": "x" * 129},
        {"max_model_calls": 0},
        {"deadline_s": 0},
        {"prefix_trajectory": []},
    ],
)
async def test_what_makes_no_sense_is_refused_when_a_session_is_opened(orchestrate, body):
    async with orchestrate() as user:
        status, told = await user.ask("POST", "/sessions", body)
        assert (status, told["error"]["code"]) == (400, "invalid_request")
        assert (await user.ask("GET", "/sessions"))[1] == {"sessions": []}


async def test_limits_have_names_of_their_own(orchestrate):
    async with orchestrate(["a" * 30, "b" * 30]) as user:
        body = {"max_total_tokens": 12, "sampling": {"max_tokens": 8}, "on_limit": "message", "deadline_s": 60}
        _, opened = await user.ask("POST", "/sessions", body)
        used = [(await user.call(opened["api_key"], USER))[2]["usage"]["completion_tokens"] for _ in range(3)]
        _, summary = await user.ask("GET", f"/sessions/{opened['session_id']}")
    assert used == [8, 4, 0]
    assert (summary["truncated"], summary["tokens_drawn"]) == ("session_tokens", 12)


async def test_what_was_closed_is_kept_for_a_while_and_deleted_on_demand(orchestrate):
    async with orchestrate() as user:
        for name in ("a", "b", "c"):
            await user.ask("POST", "/sessions", {"session_id": name})
            await user.ask("POST", f"/sessions/{name}/close")
        names = [session["session_id"] for session in (await user.ask("GET", "/sessions"))[1]["sessions"]]
        assert names == ["b", "c"]
        assert (await user.ask("POST", "/sessions", {"session_id": "b"}))[0] == 400
        assert (await user.ask("DELETE", "/sessions/b"))[1]["deleted"]
        assert (await user.ask("GET", "/sessions/b"))[0] == 404
        _, opened = await user.ask("POST", "/sessions", {"session_id": "b"})
        await user.ask("DELETE", "/sessions/b")
        assert (await user.call(opened["api_key"], USER))[0] == 404
        assert (await user.ask("PUT", "/sessions"))[0] == 404


async def test_a_session_is_closed_once_however_many_ask_for_it_at_the_same_time(orchestrate, gated):
    sampler = gated("a")
    async with orchestrate(sampler=sampler) as user:
        _, opened = await user.ask("POST", "/sessions", {"session_id": "a"})
        call = asyncio.create_task(user.call(opened["api_key"], USER))
        await sampler.asked.wait()
        asked = [user.ask("POST", "/sessions/a/close") for _ in range(3)]
        statuses = sorted([status for status, _ in await asyncio.gather(*asked, user.ask("DELETE", "/sessions/a"))])
        assert statuses[0] == 200
        assert set(statuses) <= {200, 404}
        assert (await call)[0] == 404
        assert (await user.ask("GET", "/sessions"))[1] == {"sessions": []}


async def test_calls_wait_for_the_end_of_a_pause_in_each_dialects_words(orchestrate):
    async with orchestrate(sampler=UpdatedSampler(7)) as user:
        key = user.served.key
        assert (await user.ask("POST", "/admin/pause"))[1] == {"paused": "drain", "in_flight": 0}
        status, headers, body = await user.call(key, USER)
        assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "1", "model_busy")
        status, headers, body = await user.call(key, USER, path="/v1/messages", max_tokens=9)
        assert (status, headers["Retry-After"], body["error"]["type"]) == (529, "1", "overloaded_error")
        assert (await user.ask("GET", "/health"))[1]["paused"] == "drain"
        assert (await user.ask("POST", "/admin/resume", {"weight_version": 7}))[1]["weight_version"] == 7
        assert (await user.call(key, USER))[0] == 200
        record = await user.served.close()
    assert (len(record.nodes), record.num_calls) == (1, 2)


@pytest.mark.parametrize(("mode", "first"), [("drain", 200), ("abort", 429), ("keep", 200)])
async def test_a_pause_drains_gives_up_or_keeps_what_is_in_flight(orchestrate, gated, mode, first):
    sampler = gated("a", "b")
    async with orchestrate(sampler=sampler) as user:
        call = asyncio.create_task(user.call(user.served.key, USER))
        await sampler.asked.wait()
        pause = asyncio.create_task(user.ask("POST", "/admin/pause", {"mode": mode}))
        # Twice, as orchestrators do that got no answer.
        again = asyncio.create_task(user.ask("POST", "/admin/pause", {"mode": mode}))
        if mode != "drain":
            assert (await pause)[1]["in_flight"] == (1 if mode == "keep" else 0)
        assert not call.done() or mode == "abort"
        sampler.gate.set()
        assert (await call)[0] == first
        assert (await pause)[1]["paused"] == (await again)[1]["paused"] == mode
        await user.ask("POST", "/admin/resume")
        retried = await user.call(user.served.key, USER)
        record = await user.served.close()
    assert retried[0] == 200
    assert [request.request_id for request in sampler.inner.requests][: len(record.nodes)] == [
        f"s/{number}" for number in range(len(record.nodes))
    ]


async def test_after_a_resume_no_call_is_answered_by_an_older_version(orchestrate):
    sampler = UpdatedSampler(6)
    async with orchestrate(sampler=sampler) as user:
        _, opened = await user.ask("POST", "/sessions", {"session_id": "any"})
        _, fresh = await user.ask("POST", "/sessions", {"session_id": "fresh", "min_version": 9})
        _, exact = await user.ask("POST", "/sessions", {"session_id": "exact", "exact_version": 6})
        await user.call(opened["api_key"], USER)
        await user.ask("POST", "/admin/pause")
        await user.ask("POST", "/admin/resume", {"weight_version": 8})
        status, headers, body = await user.call(opened["api_key"], USER, n=1)
        assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "1", "model_busy")
        assert (await user.call(exact["api_key"], USER))[0] == 200, "who names one version gets that one"
        sampler.version = 8
        assert (await user.call(opened["api_key"], USER, n=1))[0] == 200
        assert (await user.call(fresh["api_key"], USER))[0] == 429, "what a session asks for itself still holds"
        await user.ask("POST", "/admin/resume")
        sampler.version = 7
        assert (await user.call(opened["api_key"], USER, n=1))[0] == 429, "a resume that names none changes nothing"
        await user.ask("POST", "/admin/resume", {"weight_version": 7})
        assert (await user.call(opened["api_key"], USER, n=1))[0] == 200, "an older version is told by its name"
        _, rollout = await user.ask("GET", "/sessions/any/rollout")
    assert [node["weight_version"] for node in rollout["nodes"]] == [[6, 6], [8, 8], [7, 7]]


async def test_what_an_older_version_drew_for_a_call_that_was_given_up_is_not_its_answer(orchestrate, gated):
    sampler = UpdatedSampler(6)
    slow = gated()
    slow.inner = sampler
    async with orchestrate(sampler=slow) as user:
        call = asyncio.create_task(user.call(user.served.key, USER))
        await slow.asked.wait()
        await user.ask("POST", "/admin/pause", {"mode": "abort"})
        assert (await call)[0] == 429
        await sampler.sample(slow.request)
        sampler.version = 7
        slow.gate.set()
        await user.ask("POST", "/admin/resume", {"weight_version": 7})
        assert (await user.call(user.served.key, USER))[0] == 200
        record = await user.served.close()
    assert [node.completion.versions[0].version for node in record.nodes] == [7]


async def test_the_metrics_are_prometheus_text(orchestrate):
    async with orchestrate(["a"]) as user:
        await user.call(user.served.key, USER)
        await user.call("nobody", USER)
        async with user.client.get(f"http://127.0.0.1:{user.control.port}/metrics") as response:
            lines = (await response.text()).splitlines()
    assert 'etude_gateway_requests_total{path="/v1/chat/completions",status="200"} 1' in lines
    assert 'etude_gateway_requests_total{path="/v1/chat/completions",status="401"} 1' in lines
    assert "etude_gateway_sessions_open 1" in lines
    assert "etude_gateway_tokens_drawn_total 2" in lines


def test_a_short_admin_key_is_no_key():
    with pytest.raises(ValueError, match="16 characters"):
        ControlApi(object(), admin_key="short")
