"""What a store said, with what to do about it."""

import errno

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

_MAX_TEXT = 500
_AGAIN = "then run the same command again, it resumes"
_REGION = f"the bucket has another region, or endpoint; set AWS_REGION, or AWS_ENDPOINT_URL, {_AGAIN}"
_CONDITIONS = "a run needs a store with conditional writes (If-Match and If-None-Match); choose one that has them"
_DENIED = "access denied; check the credentials and rights of this user"
_FULL = f"the store has no room left; free some, {_AGAIN}"

_ADVICE = {
    "ExpiredToken": f"the credentials have expired; renew them, {_AGAIN}",
    "TokenRefreshRequired": f"the credentials have expired; renew them, {_AGAIN}",
    "RequestTimeTooSkewed": f"the clock of this machine is wrong by minutes; set it, {_AGAIN}",
    "SignatureDoesNotMatch": "the secret does not belong to the access key, or a proxy changes requests; check both",
    "InvalidAccessKeyId": "the store does not know this access key; check the credentials",
    "AccessDenied": _DENIED,
    "NoSuchBucket": "there is no such bucket; create it, or correct the URL",
    "AuthorizationHeaderMalformed": _REGION,
    "incorrectly configured region": _REGION,
    "ETag required": f"the store sends no ETag; {_CONDITIONS}",
    "NotImplemented": _CONDITIONS,
    "not yet implemented": _CONDITIONS,
    "SlowDown": f"the store asks for fewer requests; wait, or lower weights.uploads, {_AGAIN}",
    "InsufficientStorage": _FULL,
    "StorageFull": _FULL,
    "QuotaExceeded": _FULL,
    "contained empty path segment": "delete or rename the object with // in its key, or choose another prefix",
}
"""By what stores, and the client, put into their messages."""


def explain(error: BaseException) -> str:
    """Return one line: what the backend said and what to do about it."""
    text = text_of(error)
    if is_disk_full(error):
        return "the disk is full; free some space and run the same command again, it resumes"
    for said, advice in _ADVICE.items():
        if said in text:
            return f"{advice} ({text})"
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
        return f"{_DENIED} ({text})"
    return f"{text}; check that the store is reachable, {_AGAIN}"


def text_of(error: BaseException) -> str:
    """Return what the backend said, in one line and without what is for its authors only."""
    return " ".join(str(error).partition("\n\nDebug source:")[0].split())[:_MAX_TEXT]


def is_bucket_missing(error: BaseException) -> bool:
    """Whether it is the bucket that does not exist, and not just an object in it."""
    text = text_of(error)
    return "NoSuchBucket" in text or "ContainerNotFound" in text or "bucket does not exist" in text


def is_disk_full(error: BaseException) -> bool:
    """Whether there is no room for what was to be written."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in codes:
        return True
    return any(f"(os error {code})" in str(error) for code in codes)
