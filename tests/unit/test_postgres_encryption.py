"""Where PostgreSQL and its client do not agree on encryption, that is said, and not that it cannot be reached."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from grelmicro.backends.postgres import PostgresProvider
from grelmicro.errors import BackendUnavailableError
from tests.helpers.api_server import certificate
from tests.helpers.postgres import with_settings

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@asynccontextmanager
async def encrypting(answer: Answer) -> AsyncIterator[str]:
    """A server that agrees to encrypt, and then does that; a URL that asks for it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(8)  # may it be encrypted?
            writer.write(b"S")
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone, as it should
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"postgresql://user:s3cret@127.0.0.1:{port}/db"


async def refusal(url: str) -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        await PostgresProvider(url).check()
    assert "s3cret" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["require", "verify-full"])
async def test_a_server_without_encryption_is_told_from_one_that_is_down(
    postgres_url: str, tmp_path: Path, mode: str
) -> None:
    root = str(certificate(tmp_path) / "cert.pem")
    told = await refusal(with_settings(postgres_url, sslmode=mode, sslrootcert=root))
    assert told.endswith("it takes no encrypted connections: turn ssl on there, or give sslmode=prefer")
    await PostgresProvider(with_settings(postgres_url, sslmode="prefer")).check()


async def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    theirs, ours = certificate(tmp_path / "theirs"), certificate(tmp_path / "ours")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(theirs / "cert.pem", theirs / "key.pem")
    async with encrypting(lambda _, writer: writer.start_tls(context)) as url:
        told = await refusal(with_settings(url, sslmode="verify-full", sslrootcert=str(ours / "cert.pem")))
    assert "an encrypted connection fails (self-signed certificate)" in told
    assert told.endswith(": check sslmode, sslrootcert and the host in its certificate")


async def test_what_is_no_encryption_at_all_is_told() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"something else altogether")
        await writer.drain()

    async with encrypting(answer) as url:
        told = await refusal(with_settings(url, sslmode="require"))
    assert "an encrypted connection fails (" in told
    assert "check host and port" not in told
