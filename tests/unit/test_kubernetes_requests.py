"""Requests to an API server: what is sent, what each answer means, and that each ends in time and is sent once."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from email.utils import formatdate
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web

from grelmicro.backends.kubernetes import channel, errors
from grelmicro.backends.kubernetes import requests as requests_module
from grelmicro.backends.kubernetes.access import Access
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.requests import Answer, ForbiddenError, Gone, Requests
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, OutcomeUnknownError, OutOfContextError
from tests.helpers.api_server import LEASE, PATH, ApiServer, Object, Seen, cut, kubeconfig, silence, status, text
from tests.helpers.worlds import eventually

pytestmark = pytest.mark.usefixtures("nothing_left")

IMPATIENT_S = 0.4
"""Seconds after which a request ends of which a test waits for the end."""

Send = Callable[[Requests], Awaitable[Answer]]


async def reading(requests: Requests) -> Answer:
    return await requests.read("a", "reading 'lock:a'")


async def listing(requests: Requests) -> Answer:
    return await requests.list("l=v", "listing", limit=5)


async def creating(requests: Requests) -> Answer:
    return await requests.create(LEASE, "acquiring 'lock:a'")


async def replacing(requests: Requests) -> Answer:
    return await requests.replace("a", LEASE, "acquiring 'lock:a'")


READS: tuple[Send, ...] = (reading, listing)
WRITES: tuple[Send, ...] = (creating, replacing)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer() as api:
        yield api


@pytest.fixture
async def requests(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Requests]:
    monkeypatch.setattr(channel, "CONNECTING", 0.05)  # for which closing waits after a request without an answer
    requests = Requests(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url), request_timeout=1.5))
    await requests.open()
    yield requests
    await requests.close()


@contextmanager
def impatient(requests: Requests) -> Iterator[None]:
    """Requests end early within the block; those before it and after it have the time of a busy machine."""
    exchange, limit = requests._get_exchange(), requests.limit
    exchange._limit = requests.limit = IMPATIENT_S
    try:
        yield
    finally:
        exchange._limit = requests.limit = limit


async def refusal(send: Send, requests: Requests) -> CoordinationBackendError:
    with pytest.raises(CoordinationBackendError) as refusal:
        await send(requests)
    assert "secret" not in str(refusal.value)
    assert "kubernetes://default" in str(refusal.value)
    return refusal.value


# What is sent


async def test_an_object_is_sent_as_it_is_and_comes_as_it_is(requests: Requests, api: ApiServer) -> None:
    body: Object = {
        **LEASE,
        "metadata": {"name": "a", "uid": "7", "resourceVersion": "12", "annotations": {"ü": "\u2028"}, "unknown": [1]},
        "spec": {"renewTime": "2026-01-01T00:00:00.000000Z", "unknown": None},
    }
    answer = await requests.replace("a", body, "writing")
    assert (answer.status, answer.body, api.seen[-1].body) == (200, body, body)
    assert api.seen[-1].call == ("PUT", f"{PATH}/a")
    await requests.create(body, "writing", urgent=True)
    assert (api.seen[-1].call, api.seen[-1].body) == (("POST", PATH), body)
    assert (await requests.read("a", "reading")).body == LEASE
    assert (api.seen[-1].call, api.seen[-1].content) == (("GET", f"{PATH}/a"), b"")


async def test_a_page_is_asked_for_by_label_and_token(requests: Requests, api: ApiServer) -> None:
    await requests.list("grelmicro.io/prefix=shop", "listing", limit=100)
    assert dict(api.seen[-1].request.query) == {"labelSelector": "grelmicro.io/prefix=shop", "limit": "100"}
    await requests.list("", "listing", limit=1, token="a+/=&")
    assert dict(api.seen[-1].request.query) == {"limit": "1", "continue": "a+/=&"}


async def test_an_answer_has_the_time_of_the_api_server(requests: Requests, api: ApiServer) -> None:
    api.answers += [
        status(404, {"Date": "Thu, 01 Jan 2026 00:00:07 GMT"}),
        status(404, {"Date": "some time"}),
    ]
    assert (await reading(requests)).date == 1_767_225_607.0
    assert (await reading(requests)).date is None


@pytest.mark.parametrize(("code", "allowed"), [(200, True), (404, True), (403, False)])
async def test_an_object_is_deleted_where_that_is_allowed(
    requests: Requests, api: ApiServer, caplog: pytest.LogCaptureFixture, code: int, allowed: bool
) -> None:
    api.answers.append(status(code))
    assert await requests.delete("a", "dropping 'process:a'") is allowed
    assert api.seen[-1].call == ("DELETE", f"{PATH}/a")
    assert not caplog.records, "a right that is missing is no trouble"
    api.answers.append(status(500))
    with pytest.raises(OutcomeUnknownError):
        await requests.delete("a", "dropping 'process:a'")


# What each answer means


@pytest.mark.parametrize(
    ("send", "code"), [(reading, 404), (replacing, 404), (replacing, 409), (creating, 409), (creating, 201)]
)
async def test_what_a_caller_decides_on_is_an_answer(requests: Requests, api: ApiServer, send: Send, code: int) -> None:
    api.answers.append(status(code, reason="Some"))
    answer = await send(requests)
    assert (answer.status, answer.body["reason"]) == (code, "Some")


@pytest.mark.parametrize("send", WRITES)
@pytest.mark.parametrize("code", [302, 400, 401, 403, 405, 410, 413, 415, 422, 429])
async def test_a_refused_write_changed_nothing(requests: Requests, api: ApiServer, send: Send, code: int) -> None:
    api.answers += [status(code, {"Retry-After": "60", "Location": "/elsewhere"})] * 2
    assert type(await refusal(send, requests)) in (BackendUnavailableError, ForbiddenError, Gone)
    assert len(api.seen) == (2 if code == 401 else 1)


@pytest.mark.parametrize("send", WRITES)
@pytest.mark.parametrize("code", [408, 500, 502, 503, 504])
async def test_a_write_that_fails_in_the_server_may_have_happened(
    requests: Requests, api: ApiServer, send: Send, code: int
) -> None:
    api.answers.append(status(code, {"Retry-After": "1"}))
    assert type(await refusal(send, requests)) is OutcomeUnknownError
    assert len(api.seen) == 1


@pytest.mark.parametrize("send", READS)
@pytest.mark.parametrize("code", [400, 409, 500, 503])
async def test_a_failed_read_changed_nothing(requests: Requests, api: ApiServer, send: Send, code: int) -> None:
    api.answers.append(status(code))
    assert type(await refusal(send, requests)) is BackendUnavailableError


async def test_a_namespace_that_does_not_exist_is_named(requests: Requests, api: ApiServer) -> None:
    api.answers.append(status(404, details={"kind": "namespaces", "name": "default"}))
    error = await refusal(creating, requests)
    assert type(error) is BackendUnavailableError
    assert "has no namespace default: create it" in str(error)


async def test_a_token_of_a_page_can_expire(requests: Requests, api: ApiServer) -> None:
    api.answers.append(status(410, reason="Expired"))
    assert type(await refusal(listing, requests)) is Gone


@pytest.mark.parametrize("code", [200, 404])
async def test_what_is_no_api_server_is_not_believed(requests: Requests, api: ApiServer, code: int) -> None:
    api.answers += [text("<html>log in", code)] * 2
    error = await refusal(reading, requests)
    assert type(error) is BackendUnavailableError
    assert "nothing that Kubernetes writes" in str(error)
    error = await refusal(replacing, requests)
    assert type(error) is (OutcomeUnknownError if code == 200 else BackendUnavailableError)


@pytest.mark.parametrize("code", [400, 422])
@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            'webhook "policy.corp" denied it: label "team" is\nmissing.',
            '"policy.corp" denied it: label "team" is missing',
        ),
        ('Lease "shop.lock.cart" is invalid', 'Lease "shop.lock.cart" is invalid'),
        ('value "web-1:task:secret-0123" is long', 'value "..." is long'),
        ('extra text "secret-0"', 'extra text "..."'),
        ("of web-1:task:secret-0123 here", "of ... here"),
        ("of web-2:task:0123456789abcdef0 there", "of web-2:task:... there"),
        ('data "it is \\"secret\\"" is wrong', 'data "..." is wrong'),
        ("x" * 1000, "x" * 200),
        ("", "it gave no reason"),
    ],
)
async def test_what_is_not_accepted_is_told_in_the_servers_words_without_what_was_sent(
    requests: Requests, api: ApiServer, code: int, message: str, words: str
) -> None:
    annotations = {"grelmicro.io/name": "lock:cart", "grelmicro.io/data": '{"note": "it is \\"secret\\""}'}
    body: Object = {
        "metadata": {"name": "shop.lock.cart", "annotations": annotations},
        "spec": {"holderIdentity": "web-1:task:secret-0123"},
    }
    api.answers.append(status(code, reason="Invalid", message=message, details={"x": "secret"}))
    with pytest.raises(BackendUnavailableError) as refused:
        await requests.create(body, "writing")
    assert f"{words}: check" in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_words_about_a_failure_of_the_server_are_not_shown(requests: Requests, api: ApiServer) -> None:
    api.answers.append(status(500, reason="Invalid", message='spec.holderIdentity: "secret"', details={"x": "secret"}))
    await refusal(replacing, requests)


# 403


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_told", set())


def forbidden(verb: str) -> Object:
    message = (
        f'leases.coordination.k8s.io "a" is forbidden: User "system:serviceaccount:shop:web" cannot {verb} '
        'resource "leases" in API group "coordination.k8s.io" in the namespace "default"'
    )
    return {"reason": "Forbidden", "message": message, "details": {"name": "a", "group": "coordination.k8s.io"}}


@pytest.mark.parametrize(
    ("send", "verb"), [(reading, "get"), (listing, "list"), (creating, "create"), (replacing, "update")]
)
async def test_missing_rights_are_named_and_the_role_is_logged_once(
    requests: Requests, api: ApiServer, send: Send, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.answers += [status(403, **forbidden(verb))] * 2
    for _ in range(2):
        error = await refusal(send, requests)
        assert type(error) is ForbiddenError
        assert (
            f"does not let system:serviceaccount:shop:web {verb} leases.coordination.k8s.io in namespace default"
            in str(error)
        )
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "kind: Role" in record.message
    assert "namespace: default" in record.message
    assert f'"{verb}"' in record.message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"message": "x is forbidden", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}, "being deleted"),
        ({"message": 'leases "a" is forbidden: exceeded quota: leases, used: 3'}, "exceeded quota"),
        ({}, "it gave no reason"),
    ],
)
async def test_what_else_forbids_is_told_without_a_role(
    requests: Requests, api: ApiServer, more: Object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.answers.append(status(403, **more))
    assert words in str(await refusal(creating, requests))
    assert caplog.records == []


# 429


async def test_a_busy_server_is_asked_again_when_it_says(requests: Requests, api: ApiServer) -> None:
    async def ask(send: Send) -> float:
        """Seconds until it is answered."""
        begun = monotonic()
        assert (await send(requests)).status == 200
        return monotonic() - begun

    sends = (*READS, *WRITES)
    api.answers += [status(429, {"Retry-After": "1"}) for _ in sends]
    assert min(await asyncio.gather(*map(ask, sends))) >= 0.99
    assert list(Counter(seen.call for seen in api.seen).values()) == [2, 2, 2, 2]


async def test_a_busy_server_may_say_a_time_of_its_own_clock(requests: Requests, api: ApiServer) -> None:
    now = 1_000_000_000.0
    headers = {"Date": formatdate(now, usegmt=True), "Retry-After": formatdate(now + 1, usegmt=True)}
    api.answers.append(status(429, headers))
    begun = monotonic()
    assert (await replacing(requests)).status == 200
    assert monotonic() - begun >= 0.99


async def test_a_busy_server_is_never_asked_without_a_pause(requests: Requests, api: ApiServer) -> None:
    answers = {
        "zero": status(429, {"Retry-After": "0"}),
        "negative": status(429, {"Retry-After": "-5"}),
        "words": status(429, {"Retry-After": "soon"}),
        "none": status(429),
    }

    async def answer(seen: Seen) -> web.StreamResponse:
        return await answers[seen.request.path.rpartition("/")[2]](seen)

    def replacing(name: str) -> Send:
        return lambda requests: requests.replace(name, LEASE, "acquiring")

    api.answers += [answer] * 50
    for error in await asyncio.gather(*(refusal(replacing(name), requests) for name in answers)):
        assert type(error) is BackendUnavailableError
        assert "too busy" in str(error)
    for name, times in Counter(seen.request.path.rpartition("/")[2] for seen in api.seen).items():
        assert 2 <= times <= 3, name


async def test_nobody_waits_for_longer_than_a_request_may_take(requests: Requests, api: ApiServer) -> None:
    api.answers.append(status(429, {"Retry-After": "2"}))
    begun = monotonic()
    assert type(await refusal(replacing, requests)) is BackendUnavailableError
    assert monotonic() - begun < 1.0


async def test_a_read_waits_for_a_server_that_starts(requests: Requests, api: ApiServer) -> None:
    api.answers.append(status(503, {"Retry-After": "0"}))
    assert (await reading(requests)).status == 200


# No answer


@pytest.mark.parametrize("send", WRITES)
@pytest.mark.parametrize("used_before", [False, True])
async def test_a_write_without_an_answer_may_have_happened_and_is_sent_once(
    requests: Requests, api: ApiServer, send: Send, used_before: bool
) -> None:
    if used_before:
        await reading(requests)
    begun = len(api.seen)
    api.answers.append(cut)
    error = await refusal(send, requests)
    assert type(error) is OutcomeUnknownError
    assert "ended the connection before it answered" in str(error)
    assert len(api.seen) == begun + 1


@pytest.mark.parametrize("send", READS)
async def test_a_read_without_an_answer_is_sent_twice_at_most(requests: Requests, api: ApiServer, send: Send) -> None:
    api.answers.append(cut)
    assert (await send(requests)).status == 200
    assert len(api.seen) == 2
    api.answers += [cut, cut]
    assert type(await refusal(send, requests)) is BackendUnavailableError
    assert len(api.seen) == 4


@pytest.mark.parametrize(("send", "kind"), [(reading, BackendUnavailableError), (replacing, OutcomeUnknownError)])
async def test_silence_ends_in_time(requests: Requests, api: ApiServer, send: Send, kind: type[Exception]) -> None:
    await reading(requests)
    api.answers.append(silence)
    begun = monotonic()
    with impatient(requests):
        error = await refusal(send, requests)
    assert type(error) is kind
    assert "did not answer within 0.4 s" in str(error)
    assert IMPATIENT_S - 0.01 < monotonic() - begun < 4.0
    assert (await send(requests)).status == 200


async def halfway(seen: Seen) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(seen.request)
    await response.write(b'{"kind":')
    return await cut(seen)


async def dripping(seen: Seen) -> web.StreamResponse:
    """One byte at a time, so that something always comes."""
    response = web.StreamResponse()
    await response.prepare(seen.request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answer", [halfway, dripping])
async def test_half_an_answer_is_none(
    requests: Requests, api: ApiServer, answer: Callable[[Seen], Awaitable[web.StreamResponse]]
) -> None:
    await reading(requests)
    api.answers += [answer, answer, answer]
    with impatient(requests):
        assert type(await refusal(replacing, requests)) is OutcomeUnknownError
        assert type(await refusal(reading, requests)) is BackendUnavailableError


@pytest.mark.parametrize("send", [reading, replacing])
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "check that it runs"),
        ("http://no.such.host.invalid:1", "check that it runs, and the address"),
    ],
)
async def test_what_was_never_sent_changed_nothing(tmp_path: Path, send: Send, url: str, words: str) -> None:
    requests = Requests(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", url), request_timeout=3.0))
    await requests.open()
    assert words in str(await refusal(send, requests))
    await requests.close()


@pytest.mark.parametrize("token", ["secret\nHost: b", "secret\0"])
@pytest.mark.parametrize("send", [reading, replacing])
async def test_what_cannot_be_sent_changed_nothing(
    requests: Requests, api: ApiServer, monkeypatch: pytest.MonkeyPatch, send: Send, token: str
) -> None:
    async def headers(self: Access) -> dict[str, str]:
        return {"Authorization": token}

    monkeypatch.setattr(Access, "headers", headers)
    error = await refusal(send, requests)
    assert type(error) is BackendUnavailableError
    assert "no request can be made of" in str(error)
    assert api.seen == []


async def test_an_address_where_nobody_answers_is_given_up_early(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    requests = Requests(
        Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", f"https://127.0.0.1:{port}"), request_timeout=0.5)
    )
    await requests.open()
    begun = monotonic()
    error = await refusal(replacing, requests)  # the handshake of TLS never ends
    assert type(error) is BackendUnavailableError
    assert "no connection within 0.3 s" in str(error)
    assert monotonic() - begun < 2.0
    await requests.close()
    silent.close()


async def test_a_cancelled_request_ends_at_once(requests: Requests, api: ApiServer) -> None:
    api.answers.append(silence)
    task = asyncio.create_task(replacing(requests))
    await eventually(lambda: len(api.seen) == 1, "the request arrived")
    task.cancel()
    begun = monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert monotonic() - begun < 1.0
    assert (await replacing(requests)).status == 200


# Connections


async def test_renewals_have_connections_of_their_own(requests: Requests, api: ApiServer) -> None:
    api.answers += [silence] * 60
    ordinary = [asyncio.create_task(replacing(requests)) for _ in range(60)]
    await eventually(lambda: len(api.seen) == 10, "ten requests arrived")
    api.answers.clear()
    for _ in range(20):
        assert (await requests.replace("a", LEASE, "renewing", urgent=True)).status == 200
    assert not any(task.done() for task in ordinary), "all that while, no other connection was free"
    answers = await asyncio.gather(*ordinary, return_exceptions=True)
    sent = [answer for answer in answers if isinstance(answer, OutcomeUnknownError)]
    unsent = [answer for answer in answers if isinstance(answer, BackendUnavailableError)]
    assert (len(sent), len(unsent)) == (10, 50)


async def test_requests_need_no_thread(requests: Requests, api: ApiServer) -> None:
    """An application may have used all of them up."""
    await reading(requests)
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    busy = [asyncio.create_task(asyncio.to_thread(_wait, release, loop)) for _ in range(64)]
    await asyncio.sleep(0.05)
    for send in (reading, replacing, creating, listing):
        assert (await send(requests)).status == 200
    release.set()
    await asyncio.gather(*busy)


def _wait(event: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    asyncio.run_coroutine_threadsafe(event.wait(), loop).result()


async def test_connections_are_used_again(requests: Requests, api: ApiServer) -> None:
    for _ in range(20):
        await replacing(requests)
    api.answers.append(status(404))
    await reading(requests)
    assert len(api.connections) == 1


async def test_a_closed_one_says_so(requests: Requests) -> None:
    await requests.close()
    with pytest.raises(OutOfContextError, match="closing"):
        await reading(requests)


# The watch


def stream(
    *lines: bytes, end: Callable[[Seen], Awaitable[web.StreamResponse]] | None = None
) -> Callable[..., Awaitable[web.StreamResponse]]:
    async def answer(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(seen.request)
        for line in lines:
            await response.write(line)
            await asyncio.sleep(0)
        if end is not None:
            await end(seen)
        return response

    return answer


ADDED = b'{"type":"ADDED","object":{"kind":"Lease","metadata":{"name":"a","resourceVersion":"5"}}}\n'
BOOKMARK = b'{"type":"BOOKMARK","object":{"kind":"Lease","metadata":{"resourceVersion":"9"}}}\n'


async def events(requests: Requests, started: Callable[[], None] | None = None) -> list[Object]:
    return [event async for event in requests.watch("grelmicro.io/prefix=shop", "12", started)]


async def test_a_watch_gives_events_as_they_come_until_the_server_ends_it(requests: Requests, api: ApiServer) -> None:
    api.answers.append(stream(ADDED[:20], ADDED[20:] + BOOKMARK, ADDED))
    begun: list[bool] = []
    found = await events(requests, lambda: begun.append(True))
    assert [event["type"] for event in found] == ["ADDED", "BOOKMARK", "ADDED"]
    assert found[0]["object"]["metadata"] == {"name": "a", "resourceVersion": "5"}
    assert begun == [True]
    query = dict(api.seen[-1].request.query)
    assert int(query.pop("timeoutSeconds")) > 60
    assert query == {
        "watch": "1",
        "allowWatchBookmarks": "1",
        "labelSelector": "grelmicro.io/prefix=shop",
        "resourceVersion": "12",
    }


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (status(410, reason="Expired"), Gone, "list again"),
        (stream(b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n'), Gone, "list again"),
        (stream(b'{"type":"ERROR","object":{"kind":"Status","code":500}}\n'), BackendUnavailableError, "answered 500"),
        (status(403, **forbidden("watch")), ForbiddenError, "watch leases.coordination.k8s.io"),
        (status(429, {"Retry-After": "1"}), BackendUnavailableError, "too busy"),
        (status(503), BackendUnavailableError, "answered 503"),
        (text("<html>", 404), BackendUnavailableError, "nothing that Kubernetes writes"),
        (text("<html>", 200), BackendUnavailableError, "no event"),
        (stream(b'{"type":"ADDED"}\n'), BackendUnavailableError, "no event"),
        (stream(ADDED, end=cut), BackendUnavailableError, "ended the connection"),
        (cut, BackendUnavailableError, "ended the connection"),
        (silence, BackendUnavailableError, "did not answer within 0.4 s"),
    ],
)
async def test_a_watch_that_fails_says_how(
    requests: Requests,
    api: ApiServer,
    answer: Callable[[Seen], Awaitable[web.StreamResponse]],
    kind: type[Exception],
    words: str,
) -> None:
    api.answers.append(answer)
    limited = impatient(requests) if answer is silence else nullcontext()
    with limited, pytest.raises(kind, match=words) as refusal:
        await events(requests)
    assert type(refusal.value) is kind
    assert refusal.value.args[0].startswith("watching: kubernetes://default ")


async def test_a_watch_on_a_dead_connection_ends(
    requests: Requests, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "WATCHING", 0.1)
    await reading(requests)
    api.answers.append(stream(ADDED, end=silence))
    begun = monotonic()
    with impatient(requests), pytest.raises(BackendUnavailableError, match="nothing for too long"):
        await events(requests)
    assert IMPATIENT_S < monotonic() - begun < 4.0


async def test_who_stops_watching_ends_the_connection(requests: Requests, api: ApiServer) -> None:
    api.answers.append(stream(ADDED, end=silence))
    watch = requests.watch("", "1")
    assert (await anext(watch))["type"] == "ADDED"
    await watch.aclose()
    transport = api.seen[-1].request.transport
    await eventually(lambda: transport is None or transport.is_closing(), "the connection ended")
    assert "labelSelector" not in api.seen[-1].request.query
