"""One harness run: its calls, its limits, and the tree that they grow."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from time import perf_counter
from typing import cast

import msgspec

from etude.config import EdgeRule
from etude.errors import ContextOverflowError, SamplerError
from etude.gateway import refusals
from etude.gateway.auxiliary import Hints
from etude.gateway.conversation import Conversation
from etude.gateway.gate import drawn_since
from etude.gateway.ingest import CompletionError, check_completion
from etude.gateway.limits import Limits
from etude.gateway.long_prompts import LongPrompt, MadePrompt, is_long, make
from etude.gateway.lost import Delivery, LostAnswers
from etude.gateway.refusals import CallRefusedError
from etude.gateway.replays import Replays
from etude.gateway.shown import shown_conversations
from etude.gateway.spelling import OwnCalls
from etude.gateway.token_ids import shared
from etude.gateway.tree import Place, SessionTree
from etude.interfaces import Renderer, Sampler, SessionRecord, SessionSpec, ShownConversation
from etude.types import Completion, Edge, Failure, FinishReason, Node, SampleRequest

PREFIX_BREAKS = (Edge.REWRITE, Edge.TOOLS_CHANGED, Edge.UNEXTENDABLE)
MOST_BYTES = 64
"""JSON bytes per token beyond which a conversation is held to be too long without being encoded: encoding takes seconds
for megabytes, and no other session would be served meanwhile."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a call gives back, for a dialect to put into its own words."""

    call_id: str
    """Stable: a replayed call has the same."""
    message: dict[str, object]
    """OpenAI assistant message; its tool calls have ids."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a harness, in no dialect."""

    conversation: Conversation
    body_key: str
    """Digest of the request's bytes."""
    idempotency_key: str = ""
    is_retry: bool = False
    """The harness says that it sent this very request before."""
    requested: dict[str, object] = {}
    """The sampling it asked for: recorded, and overridden by the session's, but for a smaller limit of tokens."""
    model: str = ""
    """The name that it asked for, which chooses nothing."""
    parent: str = ""
    """The answer, or the tool call in it, for which it is made, if the harness says so."""
    delivery: Delivery | None = None
    """What becomes of the answer, if that can be known."""


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was admitted: what is asked of the sampler, again and again until it answers."""

    place: Place
    prompt_ids: tuple[int, ...]
    """What the call adds to its parent."""
    request: SampleRequest


class Session:
    """Calls of one key. All of it runs on one event loop.

    Call n (from 0) asks with the request id `<session>/<n>` and the seed of `call_seed`. A request that failed at the
    sampler keeps its n: when the harness sends it again, the sampler gets the identical request and may answer with
    what it drew the first time.
    """

    def __init__(
        self,
        spec: SessionSpec,
        *,
        sampler: Sampler,
        renderer: Renderer,
        context_length: int,
        call_timeout_s: float,
        rules: Sequence[EdgeRule] = (),
        oldest_version: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Draw from `sampler`, from no version older than `oldest_version` says when a call is drawn."""
        self.spec = spec
        self._sampler = sampler
        self._renderer = renderer
        self._context_length = context_length
        self._call_timeout_s = call_timeout_s
        self._opened = perf_counter()
        self._rules = rules
        self._oldest_version = oldest_version
        self._tree = SessionTree(rules)
        self._own_calls = OwnCalls()
        self._replays: Replays[Answer] = Replays(num_bytes=_num_bytes)
        self._lost: LostAnswers[Answer] = LostAnswers()
        self._running: set[asyncio.Task[Answer]] = set()
        self._unanswered: dict[str, _Plan] = {}
        self._failures: dict[str, Failure] = {}
        self._fatal: Failure | None = None
        self._limits = Limits(spec)
        self._closed = False
        self._requested: list[dict[str, object]] = []
        self._parse_errors = 0
        self._model_s = 0.0

    def submit(self, call: ModelCall) -> "asyncio.Future[Answer]":
        """Return the task that answers a call: a new one, or for a retry the one that it repeats.

        A retry is marked as one, or asks what a client asked that hung up without its answer.
        The task belongs to the session: it goes on when the client is gone. It raises `CallRefusedError`, as does this.
        """
        if self._closed:
            raise refusals.session_closed()
        earlier = self._replays.find(
            body_key=call.body_key, idempotency_key=call.idempotency_key, is_retry=call.is_retry
        )
        earlier = earlier or self._lost.find(call.conversation)
        if earlier is not None:
            self._lost.track(call.conversation, earlier, call.delivery or Delivery())
            return earlier
        answering = self._answer(call, self._plan(call))
        task = asyncio.get_running_loop().create_task(answering, name=f"call of {self.spec.session_id}")
        self._replays.add(task, body_key=call.body_key, idempotency_key=call.idempotency_key)
        self._lost.track(call.conversation, task, call.delivery or Delivery())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def count_tokens(self, conversation: Conversation) -> int:
        """Return how many tokens the prompt of a call would have; of one beyond all bounds, at least how many."""
        if self._closed:
            raise refusals.session_closed()
        least_tokens = _least_tokens(conversation)
        if least_tokens > self._context_length:
            return least_tokens
        prompt = self._prompt(conversation, Hints(), None)
        if isinstance(prompt, LongPrompt):
            prompt = self._prompt(conversation, Hints(), await make(prompt))
        assert not isinstance(prompt, LongPrompt)
        place, added = prompt
        return self._tree.length(place.parent) + len(added)

    async def close(self) -> SessionRecord:
        """Give up calls in flight, refuse all later ones, and return what there is."""
        self._closed = True
        for task in self._running:
            task.cancel()
        abandoned = len(self._running)
        await asyncio.gather(*self._running, return_exceptions=True)
        return self.record(abandoned=abandoned)

    def record(self, *, abandoned: int = 0) -> SessionRecord:
        """Return what there is; calls in flight are not in it."""
        nodes = self._tree.nodes
        shown, *others = shown_conversations(self._tree, nodes) or (ShownConversation(),)
        return SessionRecord(
            nodes=nodes,
            messages=shown.messages,
            tools=shown.tools,
            drawn_by=shown.drawn_by,
            others=tuple(others),
            answers={node.node_id: self._tree.answer(node.node_id) for node in nodes},
            num_calls=self._limits.calls,
            truncated=self._limits.reached,
            failure=self._fatal or next(iter(self._failures.values()), None),
            requested_sampling=tuple(self._requested),
            metrics=self._metrics(nodes, abandoned),
        )

    def _plan(self, call: ModelCall, made: MadePrompt | None = None) -> _Plan | LongPrompt | Answer:
        """Admit a call, or find what was asked of the sampler for it already.

        Its prompt is made here, unless that takes long: then this is called again with what was made.
        """
        if self._fatal is not None:
            raise refusals.session_failed()
        try:
            return self._unanswered.pop(call.body_key, None) or self._admit(call, made)
        except CallRefusedError as refusal:
            return self._last_words(refusal, call)
        except Exception as error:
            raise self._broken(error) from error

    async def _answer(self, call: ModelCall, plan: _Plan | LongPrompt | Answer) -> Answer:
        if isinstance(plan, LongPrompt):
            plan = self._plan(call, await make(plan))
        if not isinstance(plan, _Plan):
            assert isinstance(plan, Answer)
            return plan
        try:
            started = perf_counter()
            completion = await self._draw(plan, call.body_key)
            seconds = perf_counter() - started
            self._model_s += seconds
            return self._attach(plan, completion, started_s=started - self._opened, seconds=seconds)
        except CallRefusedError as refusal:
            return self._last_words(refusal, call)
        except Exception as error:
            raise self._broken(error) from error

    def _last_words(self, refusal: CallRefusedError, call: ModelCall) -> Answer:
        """Return an answer that nobody drew, for a session whose limits are ordinary answers; raise all other refusals.

        It is in no tree.
        """
        if refusal.code != refusals.LIMIT_REACHED or self.spec.on_limit == "error":
            raise refusal
        return Answer(
            call_id=sha256(call.body_key.encode()).hexdigest()[:24],
            message={"role": "assistant", "content": f"I have to stop here: {refusal.message}."},
            finish_reason="stop",
            prompt_tokens=0,
            completion_tokens=0,
            cached_tokens=0,
        )

    def _broken(self, error: Exception) -> CallRefusedError:
        message = f"{type(error).__name__}: {error}"[:500]
        self._fatal = Failure(component="gateway", reason="unexpected_error", message=message)
        return refusals.session_failed()

    async def _draw(self, plan: _Plan, body_key: str) -> Completion:
        """Return a checked completion; remember why there is none until the same request succeeds."""
        request = drawn_since(plan.request, self._oldest_version())
        try:
            async with asyncio.timeout(min(self._call_timeout_s, self._limits.seconds_left)):
                completion = await self._sampler.sample(request)
            owned_from = max(0, self._tree.length(plan.place.parent) - 1)
            check_completion(request, completion, owned_from=owned_from)
        except CompletionError as error:
            reason = f"completion_{error.reason}"
            self._fatal = Failure(component="sampler", reason=reason, message=str(error)[:500])
            raise refusals.session_failed() from error
        except ContextOverflowError as error:
            self._limits.give_back(plan.request.params.max_tokens)
            raise self._overflow(len(plan.request.prompt_ids)) from error
        except (SamplerError, TimeoutError, OSError) as error:
            if not self._limits.seconds_left:
                self._limits.give_back(plan.request.params.max_tokens)
                raise self._limits.refuse("deadline") from error
            self._unanswered[body_key] = plan
            refusal, reason = refusals.of_sampler(error)
            message = f"{type(error).__name__}: {error}"[:500]
            self._failures[body_key] = Failure(component="sampler", reason=reason, message=message)
            raise refusal from error
        self._failures.pop(body_key, None)
        return completion

    def _admit(self, call: ModelCall, made: MadePrompt | None) -> _Plan | LongPrompt:
        """Check the limits, find the prompt's tokens and fix what is asked of the sampler."""
        left = self._limits.tokens_left()
        least_tokens = _least_tokens(call.conversation)
        if least_tokens > self._context_length:
            raise self._overflow(least_tokens)
        hints = _hints(call)
        prompt = self._prompt(call.conversation, hints, made)
        if isinstance(prompt, LongPrompt):
            return prompt
        place, added = prompt
        sequence = self._tree.sequence(place.parent)
        sequence += added
        prompt_ids = tuple(sequence)
        room = self._context_length - len(prompt_ids)
        if room <= 0:
            raise self._overflow(len(prompt_ids))
        number = self._limits.calls
        params = msgspec.structs.replace(
            self.spec.params,
            max_tokens=min(self.spec.params.max_tokens, hints.max_tokens or room, room, left),
            stop_token_ids=tuple(sorted({*self.spec.params.stop_token_ids, *self._renderer.stop_token_ids})),
            seed=call_seed(self.spec.seed, number),
        )
        request = SampleRequest(
            request_id=f"{self.spec.session_id}/{number}",
            session_id=self.spec.session_id,
            prompt_ids=prompt_ids,
            params=params,
            min_version=self.spec.min_version,
            exact_version=self.spec.exact_version,
        )
        self._limits.reserve(params.max_tokens)
        self._requested.append(call.requested)
        return _Plan(place=place, prompt_ids=added, request=request)

    def _prompt(
        self, conversation: Conversation, hints: Hints, made: MadePrompt | None
    ) -> tuple[Place, tuple[int, ...]] | LongPrompt:
        conversation = self._own_calls.restore(conversation)
        place = self._tree.place(conversation, hints)
        if place.prompt_ids is not None:
            return place, place.prompt_ids
        if place.parent is not None:
            last = self._tree.node(place.parent).completion.token_ids[-1]
            tail = self._own_calls.named(conversation.messages[place.covered :])
            work = partial(self._renderer.extend, tail, finished=last in self._renderer.stop_token_ids)
            extension = self._made(place, work, made, long=is_long(tail))
            if isinstance(extension, LongPrompt):
                return extension
            if extension is not None:
                return place, shared(extension)
            place = self._tree.unextendable(place)
        messages = self._own_calls.named(self._tree.restore(conversation.messages))
        work = partial(self._renderer.render, messages, conversation.tools)
        whole = self._made(place, work, made, long=is_long(messages, conversation.tools))
        return whole if isinstance(whole, LongPrompt) else (place, shared(whole or ()))

    def _made(
        self, place: Place, work: Callable[[], list[int] | None], made: MadePrompt | None, *, long: bool
    ) -> list[int] | LongPrompt | None:
        """Return the tokens of a prompt, those that were made if they are for this place, or what is to be done."""
        if made is not None and made.parent == place.parent:
            return made.token_ids
        return LongPrompt(parent=place.parent, work=work) if long and made is None else work()

    def _attach(self, plan: _Plan, completion: Completion, *, started_s: float, seconds: float) -> Answer:
        drawn = len(completion.token_ids)
        self._limits.give_back(plan.request.params.max_tokens - drawn)
        self._limits.reached = ""
        message = dict(self._renderer.parse(completion.token_ids))
        self._parse_errors += bool(message.pop("tool_parse_error", False))
        call_id = sha256(plan.request.request_id.encode()).hexdigest()[:24]
        calls = cast("list[dict[str, object]]", message.get("tool_calls") or [])
        if calls:
            message["tool_calls"] = self._own_calls.issue(calls, call_id)
        self._tree.attach(
            plan.place,
            message,
            prompt_ids=plan.prompt_ids,
            completion=msgspec.structs.replace(completion, token_ids=shared(completion.token_ids)),
            call_id=call_id,
            started_s=started_s,
            seconds=seconds,
        )
        cut = completion.finish_reason is not FinishReason.STOP
        return Answer(
            call_id=call_id,
            message=message,
            finish_reason="tool_calls" if calls else "length" if cut else "stop",
            prompt_tokens=len(plan.request.prompt_ids),
            completion_tokens=drawn,
            cached_tokens=completion.cached_tokens,
        )

    def _overflow(self, prompt_tokens: int) -> CallRefusedError:
        self._limits.reached = "context"
        return refusals.context_overflow(prompt_tokens, self._context_length)

    def _metrics(self, nodes: Sequence[Node], abandoned: int) -> dict[str, float]:
        edges = Counter(node.edge for node in nodes)
        declared = {rule.name for rule in self._rules if rule.edge == "rewrite"}
        breaks = sum(node.edge in PREFIX_BREAKS and node.reason not in declared for node in nodes)
        return {
            "gateway/calls": float(len(nodes)),
            "gateway/calls_abandoned": float(abandoned),
            "gateway/replays": float(self._replays.count + self._lost.count),
            "gateway/tokens_drawn": float(sum(len(node.completion.token_ids) for node in nodes)),
            "gateway/tool_parse_errors": float(self._parse_errors),
            "gateway/model_s": self._model_s,
            "gateway/prefix_break_rate": breaks / len(nodes) if nodes else 0.0,
            **{f"gateway/edges_{edge.value}": float(edges[edge]) for edge in Edge},
        }


def call_seed(session_seed: int, call: int) -> int:
    """Return the seed of a session's n-th call: the first 63 bits of sha256("etude call <session seed> <n>")."""
    digest = sha256(f"etude call {session_seed} {call}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _hints(call: ModelCall) -> Hints:
    asked = (call.requested.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    most = next((value for value in asked if isinstance(value, int) and value > 0), None)
    return Hints(model=call.model, max_tokens=most, parent=call.parent)


def _num_bytes(answer: Answer) -> int:
    """Return about how much memory an answer takes."""
    return 1024 + 16 * answer.completion_tokens


def _least_tokens(conversation: Conversation) -> int:
    return len(msgspec.json.encode(conversation.messages)) // MOST_BYTES
