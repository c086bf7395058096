"""The model API behind the door: which session, which dialect, and the answer in its words."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from itertools import dropwhile
from re import Pattern

import msgspec

from etude.gateway import refusals
from etude.gateway.dialects import messages
from etude.gateway.dialects.chat import CHAT
from etude.gateway.dialects.dialect import Dialect, HarnessRequest
from etude.gateway.dialects.messages import MESSAGES
from etude.gateway.dialects.models import model_list, model_named
from etude.gateway.dialects.responses import NO_COMPACTION, RESPONSES
from etude.gateway.door import Head, ReadBody, Reply
from etude.gateway.lost import Delivery
from etude.gateway.refusals import CallRefusedError
from etude.gateway.sessions import Answer, ModelCall, Session
from etude.gateway.turns import Turns
from etude.gateway.volatile import strip_volatile

DIALECTS = (CHAT, MESSAGES, RESPONSES)
COUNT_PATH = f"{MESSAGES.path}/count_tokens"
MODELS_PATH = "/v1/models"

_BY_PATH = {dialect.path: dialect for dialect in DIALECTS}
_SERVED = f"POST to one of {', '.join(_BY_PATH)}"
_EVENTS = "text/event-stream"


class ModelApi:
    """Answers requests of harnesses, whatever brings them: `answer` is a `door.Handler`."""

    def __init__(
        self, find: Callable[[str], Session], *, keep_alive_s: float, volatile: Sequence[Pattern[str]], turns: Turns
    ) -> None:
        """Serve the sessions that `find` returns for their keys; it raises `CallRefusedError` for others."""
        self._find = find
        self._keep_alive_s = keep_alive_s
        self._volatile = volatile
        self._turns = turns
        self.tally: Counter[tuple[str, int]] = Counter()
        """Answers by path, without what stands for a session or a model in it, and status."""

    async def answer(self, head: Head, read: ReadBody) -> Reply:
        """Return the answer to a request, or the refusal in its dialect's envelope."""
        keys, path = _keys_and_path(head)
        try:
            reply = await self._route(path, head, keys, read)
        except CallRefusedError as refusal:
            reply = _refused(_dialect_of(path, head), refusal)
        self.tally[path if path in _BY_PATH or path == COUNT_PATH else "other", reply.status] += 1
        return reply

    @staticmethod
    def refuse(head: Head, refusal: CallRefusedError) -> Reply:
        """Return a refusal in the envelope of the dialect that a request seems to speak."""
        return _refused(_dialect_of(_keys_and_path(head)[1], head), refusal)

    async def _route(self, path: str, head: Head, keys: Sequence[str], read: ReadBody) -> Reply:
        dialect = _BY_PATH.get(path)
        is_models = path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
        if dialect is None and path != COUNT_PATH and not is_models:
            hint = NO_COMPACTION if path == f"{RESPONSES.path}/compact" else _SERVED
            raise refusals.not_served(head.method, head.path, hint)
        if head.headers.get("Upgrade", "").lower() == "websocket":
            # The one status at which Codex asks over HTTP at once, not after five tries.
            raise refusals.not_served("a websocket at", head.path, _SERVED, status=426)
        if head.method != ("GET" if is_models else "POST"):
            raise refusals.not_served(head.method, head.path, _SERVED, status=405)
        session = self._session(keys)
        body = await read(session.spec.session_id)
        if dialect is not None:
            return await self._call(session, dialect, head, body)
        if is_models:
            return _models(path, head)
        async with self._turns.turn(session.spec.session_id):
            conversation, _ = strip_volatile(messages.parse_count(body), self._volatile)
        return Reply(body=msgspec.json.encode({"input_tokens": await session.count_tokens(conversation)}))

    def _session(self, keys: Sequence[str]) -> Session:
        """Return the session that one of these keys opens: of two, a client's user may know the other one only."""
        refusal = refusals.unknown_key()
        for key in keys:
            try:
                return self._find(key)
            except CallRefusedError as error:
                refusal = error if error.status == refusals.OVER else refusal
        raise refusal

    async def _call(self, session: Session, dialect: Dialect, head: Head, body: bytes) -> Reply:
        async with self._turns.turn(session.spec.session_id):
            asked = dialect.parse(body)
            conversation, removed = strip_volatile(asked.conversation, self._volatile)
            delivery = Delivery(head.is_gone)
            call = ModelCall(
                conversation=conversation,
                body_key=sha256(f"{dialect.path}\n".encode() + body).hexdigest(),
                idempotency_key=head.headers.get("Idempotency-Key", "")[:256],
                is_retry=head.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
                model=asked.model,
                parent=head.headers.get("X-Etude-Parent", "")[:256],
                delivery=delivery,
                requested=asked.requested | ({"removed": [text[:256] for text in removed[:16]]} if removed else {}),
            )
            task = session.submit(call)
        if not asked.stream:
            return Reply(body=dialect.body(await _finished(task), asked), on_sent=delivery.done)
        # Errors have their status as long as nothing was sent.
        await asyncio.wait([task], timeout=self._keep_alive_s)
        if task.done():
            told = b"".join(dialect.events(await _finished(task), asked))
            return Reply(body=told, content_type=_EVENTS, on_sent=delivery.done)
        headers = {"Cache-Control": "no-cache"}
        parts = self._parts(dialect, asked, task)
        return Reply(parts=parts, content_type=_EVENTS, headers=headers, on_sent=delivery.done)

    async def _parts(
        self, dialect: Dialect, asked: HarnessRequest, task: "asyncio.Future[Answer]"
    ) -> AsyncIterator[bytes]:
        """Yield signs of life, and then the whole answer or why there is none."""
        while not task.done():
            yield dialect.keep_alive
            await asyncio.wait([task], timeout=self._keep_alive_s)
        try:
            answer = await _finished(task)
        except CallRefusedError as refusal:
            yield dialect.late_error(refusal, asked)
        else:
            yield b"".join(dialect.events(answer, asked))


async def _finished(task: "asyncio.Future[Answer]") -> Answer:
    """Return a call's answer; the call goes on if the client goes away, so that its retry finds it."""
    await asyncio.wait([task])
    if task.cancelled():
        raise refusals.session_closed()
    return task.result()


def _keys_and_path(head: Head) -> tuple[Sequence[str], str]:
    """Return what may be a request's key, and its path without it: some agents can be given an address and no key.

    Clients that have a key and a token, one of them of somebody else, send both.
    """
    if head.path.startswith("/s/"):
        key, _, rest = head.path[len("/s/") :].partition("/")
        return (key,), _spelled(rest)
    scheme, _, token = head.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    keys = bearer, head.headers.get("x-api-key"), head.headers.get("x-goog-api-key")
    return [key for key in keys if key], _spelled(head.path)


def _spelled(path: str) -> str:
    """Return a path as the APIs spell it.

    Whether a base address ends with `/v1` or with a slash is something that clients of one API do not agree on.
    """
    parts = dropwhile("v1".__eq__, filter(None, path.split("/")))
    return "/".join(("", "v1", *parts))


def _dialect_of(path: str, head: Head) -> Dialect:
    """Return the dialect that a request is written in; one that no path tells is Anthropic's if a header says so."""
    for dialect in DIALECTS:
        if path.startswith(dialect.path):
            return dialect
    return MESSAGES if "anthropic-version" in head.headers else CHAT


def _models(path: str, head: Head) -> Reply:
    is_anthropic = _dialect_of(path, head) is MESSAGES
    model = path[len(MODELS_PATH) + 1 :]
    shown = model_named(model, is_anthropic=is_anthropic) if model else model_list(is_anthropic=is_anthropic)
    return Reply(body=msgspec.json.encode(shown))


def _refused(dialect: Dialect, refusal: CallRefusedError) -> Reply:
    status, payload = dialect.error(refusal)
    headers = {"x-should-retry": "false"}
    if refusal.retry_after_s is not None:
        headers = {"x-should-retry": "true", "Retry-After": str(refusal.retry_after_s)}
    return Reply(status=status, body=msgspec.json.encode(payload), headers=headers)
