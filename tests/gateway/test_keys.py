# pyright: basic
"""Where a harness may put its key, and what the key is good for."""

import pytest

USER = {"role": "user", "content": "fix it"}
CALLS = [
    ("POST", "/v1/chat/completions", {"messages": [USER]}),
    ("POST", "/v1/responses", {"input": [USER]}),
    ("POST", "/v1/messages", {"messages": [USER], "max_tokens": 9}),
    ("POST", "/v1/messages/count_tokens", {"messages": [USER]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/m", None),
]


async def ask(served, method, path, body, **headers):
    url = f"http://127.0.0.1:{served.gateway.port}{path}"
    async with served.client.request(method, url, json=body, headers={"Authorization": "", **headers}) as response:
        return response.status, await response.json()


def told(path, body):
    """Return what kind of error an answer in the path's dialect is."""
    return body["error"]["type"] if path.startswith("/v1/messages") else body["error"]["code"]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_the_key_may_be_in_the_path_and_in_three_headers_and_is_useless_after_the_end(serve, method, path, body):
    async with serve(["a"] * 4) as served:
        key = served.key
        ways = [
            (path, {"Authorization": f"bearer {key}"}),
            (path, {"x-api-key": key}),
            (path, {"x-goog-api-key": key}),
            # Agents that can be given an address only send whatever key they were made with.
            (f"/s/{key}{path}", {"Authorization": "Bearer made-up"}),
        ]
        for where, headers in ways:
            assert (await ask(served, method, where, body, **headers))[0] == 200
        for where, headers in ((path, {}), (f"/s/{key[:-1]}{path}", {"x-api-key": key}), (f"/s/{path}", {})):
            status, answer = await ask(served, method, where, body, **headers)
            assert status == 401
            assert told(path, answer) in ("invalid_api_key", "authentication_error")
        await served.close()
        for where, headers in ways:
            status, answer = await ask(served, method, where, body, **headers)
            assert status == (400 if path.endswith("responses") else 403 if "messages" in path else 404)
            assert told(path, answer) in ("session_closed", "permission_error")


async def test_keys_are_long_random_and_never_those_of_another_session(serve):
    async with serve([]) as served:
        spec = served.spec
        keys = {served.key}
        for _ in range(20):
            await served.gateway.close(spec.session_id)
            keys.add(await served.gateway.open(spec))
    assert len(keys) == 21
    assert all(len(key) >= 40 for key in keys)


@pytest.mark.parametrize("path", ["/s/", "/s/x", "/s//v1/models", "/s/x/v2/models", "/v1beta/models/m:generateContent"])
async def test_other_paths_are_refused_whatever_the_key(serve, path):
    async with serve([]) as served:
        status, body = await ask(served, "POST", path, {}, **{"x-api-key": served.key})
        assert status in (404, 405)
        assert body["error"]["code"] == "not_served"
