"""Calls that get no answer, and what the harness is told.

=======================  ======  ===========================  =======================================================
refusal                  status  code                         a harness should
=======================  ======  ===========================  =======================================================
unknown key              401     invalid_api_key              stop
malformed request        400     invalid_request              stop, or ask differently
prompt too long          400     context_length_exceeded      shorten its conversation
key of another request   400     idempotency_key_reused       stop
limit of the session     403     session_limit_reached        stop
session is closed        403     session_closed               stop
session has failed       403     session_failed               stop
path is not served       404     not_served                   stop, or correct its base address
method is not served     405     not_served                   stop
websocket                426     not_served                   use HTTP
body too large           413     request_too_large            stop
unknown compression      415     unsupported_encoding         send it plain
too many connections     429     too_many_connections         use those it has, after `Retry-After` seconds
too many bytes at once   429     too_many_bytes               send less at once, after `Retry-After` seconds
weights change           429     model_busy                   try again after `Retry-After` seconds
sampler cannot answer    503     model_unavailable            try again after `Retry-After` seconds
=======================  ======  ===========================  =======================================================

In Anthropic's Messages the last two are 529, overloaded. What is over, a 403 here, is a 404 in Chat Completions and a
400 in Responses: no status ends every harness at the first request, these end those that speak the dialect.

OpenAI's and Anthropic's SDKs try again by themselves at 408, 409, 429 and 5xx, and at no other status. What went wrong
inside is in the session's record; a harness, and so the agent, is not told.
"""

from etude.errors import EtudeError, SamplerBusyError, VersionUnavailableError

LIMIT_REACHED = "session_limit_reached"
FIRST_ERROR = BAD_REQUEST = 400
NOT_FOUND = 404
OVER = 403
"""Of sessions that cannot go on, before a dialect puts it into its own words."""


class CallRefusedError(EtudeError):
    """A model call is answered with an error; dialects put it into their own envelope."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def unknown_key() -> CallRefusedError:
    """The request's key opens no session."""
    return CallRefusedError(401, "invalid_api_key", "the API key is not that of an open session")


def malformed(message: str) -> CallRefusedError:
    """The request does not say what is asked for."""
    return CallRefusedError(400, "invalid_request", message)


def context_overflow(prompt_tokens: int, context_length: int) -> CallRefusedError:
    """The prompt leaves no room for an answer."""
    # Harnesses look for these words to know that they must compact: Anthropic's first, OpenAI's after them.
    message = (
        f"prompt is too long: {prompt_tokens} tokens > {context_length - 1} maximum. This model's maximum context "
        f"length is {context_length} tokens: shorten the conversation"
    )
    return CallRefusedError(400, "context_length_exceeded", message)


def key_reused(key: str) -> CallRefusedError:
    """An idempotency key came with another body."""
    return CallRefusedError(400, "idempotency_key_reused", f"Idempotency-Key {key[:64]!r} was used for another request")


def limit_reached(limit: str) -> CallRefusedError:
    """The session has spent its calls, its tokens or its time."""
    return CallRefusedError(OVER, LIMIT_REACHED, f"the session has used up its {limit}; it cannot go on")


def session_closed() -> CallRefusedError:
    """The session's key was good until it was closed."""
    return CallRefusedError(OVER, "session_closed", "the session of this API key is closed")


def session_failed() -> CallRefusedError:
    """What the sampler returned cannot be used, so nothing more is drawn for the session."""
    return CallRefusedError(OVER, "session_failed", "the session has failed and cannot go on")


def model_busy() -> CallRefusedError:
    """No sampler serves the version asked for at the moment."""
    return CallRefusedError(429, "model_busy", "the model is busy, try again", retry_after_s=1)


def model_unavailable() -> CallRefusedError:
    """The sampler failed; it may not fail again."""
    return CallRefusedError(503, "model_unavailable", "the model cannot be reached, try again", retry_after_s=1)


def not_served(method: str, path: str, served: str, *, status: int = 404) -> CallRefusedError:
    """Nothing is behind this path, or not for this method."""
    return CallRefusedError(status, "not_served", f"{method[:16]} {path[:256]} is not served; {served}")


def unknown_coding(coding: str) -> CallRefusedError:
    """The body is compressed in a way that is not undone here."""
    message = f"Content-Encoding {coding[:32]!r} is not served: send gzip, deflate, zstd or plain JSON"
    return CallRefusedError(415, "unsupported_encoding", message)


def no_session(session_id: str) -> CallRefusedError:
    """The control API knows no such session."""
    return CallRefusedError(404, "unknown_session", f"no session {session_id[:128]!r} is known")


def body_too_large(limit: int) -> CallRefusedError:
    """The body exceeds what is read."""
    return CallRefusedError(413, "request_too_large", f"the request's body is larger than {limit} bytes")


def too_many_connections(limit: int) -> CallRefusedError:
    """The session has as many connections as it may have."""
    return CallRefusedError(
        429, "too_many_connections", f"the session has {limit} connections: use those", retry_after_s=1
    )


def too_many_bytes(limit: int) -> CallRefusedError:
    """The session sends too much at the same time."""
    message = f"the session sends more than {limit} bytes at the same time: send one request after the other"
    return CallRefusedError(429, "too_many_bytes", message, retry_after_s=1)


def of_sampler(error: Exception) -> tuple[CallRefusedError, str]:
    """Return what a harness is told when a sampler failed that may not fail again, and the reason to count by."""
    if isinstance(error, VersionUnavailableError):
        return model_busy(), "version_unavailable"
    if isinstance(error, SamplerBusyError):
        return model_busy(), "busy"
    if isinstance(error, TimeoutError):
        return model_unavailable(), "timeout"
    return model_unavailable(), "unavailable"
