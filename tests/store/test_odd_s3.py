# pyright: basic
"""What stores that speak S3 are reported to do: each answer is taken for what it means."""

import asyncio

import pytest
from odd_s3 import Answer, Hangup, OddS3, serving
from s3_kit import enter

from etude.errors import ConfigError, IntegrityError, ObjectExistsError, ObjectMissingError, StoreError
from etude.store.ledger_format import open_run_id
from etude.store.opening import open_store, probe_conditional_writes
from etude.weights.chain import WEIGHTS
from etude.weights.leases import read_leases


@pytest.fixture
def odd():
    return OddS3()


@pytest.fixture
def store(odd, monkeypatch):
    with serving(odd) as url:
        enter(url, monkeypatch)
        yield open_store("s3://bucket/run")


CONFLICT = Answer(409, "ConditionalRequestConflict")
LOST = [Hangup(after=True), Answer(503, "SlowDown", after=True), Answer(500, "InternalError", after=True)]


async def test_a_conflict_is_tried_again_and_is_not_taken_for_an_object(store, odd):
    odd.puts.extend([CONFLICT, CONFLICT])
    await store.put("new", b"1", create_only=True)
    odd.puts.append(Answer(409, "OperationAborted"))
    await store.put("new", b"2")
    assert odd.objects["run/new"] == b"2"


async def test_conflicts_without_end_are_an_error_that_names_the_object(store, odd):
    for create_only in (True, False):
        odd.puts.extend([CONFLICT] * 4)
        with pytest.raises(StoreError, match="'k' in s3://bucket/run: other writes") as caught:
            await store.put("k", b"", create_only=create_only)
        assert not isinstance(caught.value, ObjectExistsError)


@pytest.mark.parametrize("answer", LOST)
async def test_a_write_that_happened_without_an_answer_is_done(store, odd, answer):
    odd.puts.append(answer)
    await store.put("mine", b"mine", create_only=True)
    odd.puts.append(answer)
    assert await store.compare_and_swap("mine", b"next", expected=b"mine")
    odd.puts.append(answer)
    assert await store.compare_and_swap("head", b"first", expected=None)
    with pytest.raises(ObjectExistsError):
        await store.put("mine", b"other", create_only=True)
    assert odd.objects == {"run/mine": b"next", "run/head": b"first"}


@pytest.mark.parametrize("quoted", [True, False])
async def test_a_store_that_wants_its_tags_without_quotes_gets_them_so(store, odd, quoted):
    # Ceph and DigitalOcean Spaces
    odd.matches = lambda asked, tag: asked == (tag if quoted else tag.strip('"'))
    await store.put("head", b"0")
    for number in range(3):
        odd.requests.clear()
        assert await store.compare_and_swap("head", b"%d" % (number + 1), expected=b"%d" % number)
        if number:
            assert [method for method, _, _ in odd.requests] == ["GET", "PUT"]
    assert not await store.compare_and_swap("head", b"9", expected=b"0")
    await probe_conditional_writes(store)


async def test_a_swap_that_lost_to_another_writer_is_never_tried_in_another_way(store, odd):
    await store.put("head", b"0")

    def overtaken(asked: str, tag: str) -> bool:
        odd.objects["run/head"] = b"theirs"
        return False

    odd.matches = overtaken
    assert not await store.compare_and_swap("head", b"mine", expected=b"0")
    assert odd.objects["run/head"] == b"theirs"
    assert sum(method == "PUT" for method, _, _ in odd.requests) == 2


async def test_no_run_begins_in_a_store_that_ignores_conditions(store, odd):
    odd.honours_conditions = False
    with pytest.raises(StoreError, match="ignores conditions"):
        await open_run_id(store)
    assert odd.objects == {}


async def test_no_run_begins_in_a_store_that_creates_once_but_swaps_whatever_is_there(store, odd):
    odd.matches = lambda asked, tag: True
    with pytest.raises(StoreError, match="ignores conditions"):
        await open_run_id(store)
    assert odd.objects == {}


async def test_no_run_begins_in_a_store_that_refuses_every_swap(store, odd):
    odd.tag = lambda data: 'W/"weak"'
    odd.matches = lambda asked, tag: False
    with pytest.raises(StoreError, match=r"refuses every conditional write .* ETags"):
        await open_run_id(store)
    odd.tag = lambda data: ""
    with pytest.raises(StoreError, match="sends no ETag"):
        await open_run_id(store)
    assert odd.objects == {}


async def test_a_run_that_begins_leaves_no_probe_behind(store, odd):
    assert await open_run_id(store) == await open_run_id(store)
    assert list(odd.objects) == ["run/ledger/run.json"]


SAID = [
    (400, "ExpiredToken", "credentials have expired; renew"),
    (403, "ExpiredToken", "credentials have expired; renew"),
    (403, "RequestTimeTooSkewed", "clock of this machine"),
    (403, "SignatureDoesNotMatch", "secret does not belong"),
    (403, "InvalidAccessKeyId", "does not know this access key"),
    (403, "AccessDenied", "access denied; check the credentials"),
    (301, "PermanentRedirect", "set AWS_REGION"),
    (400, "AuthorizationHeaderMalformed", "set AWS_REGION"),
    (404, "NoSuchBucket", "no such bucket; create it"),
]


@pytest.mark.parametrize(("status", "code", "wanted"), SAID)
async def test_an_error_says_what_to_do_about_it(store, odd, status, code, wanted):
    odd.always = Answer(status, code, message="and\nmore")
    odd.always.body = odd.always.body.replace(b"?><Error>", b"?>\n<Error>")  # as Amazon writes it
    for call in (
        store.get("k"),
        store.put("k", b""),
        store.put("k", b"", create_only=True),
        store.compare_and_swap("k", b"", expected=b"x"),
        store.compare_and_swap("k", b"", expected=None),
        store.list("k"),
    ):
        with pytest.raises(StoreError, match=wanted) as caught:
            await call
        assert "s3://bucket/run" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, ObjectMissingError)  # which would be waited for


async def test_bodies_that_are_cut_off_are_read_to_their_end_or_refused(store, odd):
    odd.objects["run/k"] = data = bytes(range(256)) * 4096
    odd.cut_bodies = 1
    assert await store.get("k") == data
    odd.ignores_ranges = True  # so nothing can be gone on with
    odd.cut_bodies = 100
    with pytest.raises(StoreError, match="'k' in s3://bucket/run"):
        await store.get("k")


async def test_a_part_from_a_store_that_ignores_ranges_is_refused(store, odd):
    odd.objects["run/k"] = bytes(range(100))
    odd.ignores_ranges = True
    with pytest.raises(StoreError, match="'k'"):
        await store.get_range("k", 10, 5)


async def test_markers_of_folders_and_foreign_keys_are_not_listed(store, odd):
    odd.objects["run/weights/readers/one.json"] = b"{}"
    odd.junk = ["run/weights/readers/", "run/weights/", "run/weights/readers/\u00fc", "run/weights/readers/.hidden"]
    assert await store.list("weights/readers") == ["weights/readers/one.json"]
    odd.junk = ["run/weights//x"]
    with pytest.raises(StoreError, match="delete or rename the object with // in its key"):
        await store.list("weights")


async def test_a_file_that_is_no_lease_is_named_with_what_to_do(store, odd):
    odd.objects["run/weights/readers/README.txt"] = b"not a lease"
    with pytest.raises(IntegrityError, match=r"readers/README.txt.* delete it if"):
        await read_leases(store, WEIGHTS, now=0.0)


@pytest.mark.parametrize("url", ["s3://bucket/run?endpoint=http://x", "s3://bucket/run#1", "s3://bucket//run", "s3://"])
def test_a_url_of_which_a_part_would_be_ignored_is_refused(url):
    with pytest.raises(ConfigError, match=r"run.url"):
        open_store(url)


async def test_one_of_many_swaps_wins_whatever_the_answers(store, odd):
    await store.put("head", b"0")
    odd.puts.extend([None, CONFLICT, *LOST, None, CONFLICT] * 2)
    swaps = (store.compare_and_swap("head", b"by %d" % n, expected=b"0") for n in range(8))
    won = await asyncio.gather(*swaps)
    assert odd.objects["run/head"] == b"by %d" % won.index(True)


async def test_an_object_that_may_not_be_deleted_is_an_error(store, odd):
    await store.put("k", b"")
    odd.keeps = True
    with pytest.raises(StoreError, match="cannot delete object 'k' in s3://bucket/run: access denied"):
        await store.delete("k")
    odd.keeps = False
    await store.delete("k")
    assert odd.objects == {}
