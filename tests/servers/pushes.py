"""The messages that a server sends on its own account: recognised in what it sends, and taken out."""

import re
from collections.abc import Iterator

from tests.servers.faults import Match, fits

# A message of a Redis channel: an array (RESP2) or a push (RESP3) of its kind, the channel and what was published, the
# last two of any bytes without a line break.
REDIS = re.compile(
    rb"[*>]3\r\n\$7\r\nmessage\r\n\$\d+\r\n[^\r\n]*\r\n\$\d+\r\n[^\r\n]*\r\n"
    rb"|[*>]3\r\n\$8\r\nsmessage\r\n\$\d+\r\n[^\r\n]*\r\n\$\d+\r\n[^\r\n]*\r\n"
    rb"|[*>]4\r\n\$8\r\npmessage\r\n\$\d+\r\n[^\r\n]*\r\n\$\d+\r\n[^\r\n]*\r\n\$\d+\r\n[^\r\n]*\r\n"
)
NOTIFICATION = b"A"


def without_pushes(chunk: bytes, match: Match) -> tuple[bytes, int]:
    """The chunk without the pushes that fit, and how many those were."""
    messages = list(postgres_messages(chunk))
    if b"".join(messages) == chunk:
        kept = [each for each in messages if not (each.startswith(NOTIFICATION) and fits(match, each))]
        return b"".join(kept), len(messages) - len(kept)
    pushes = [found[0] for found in REDIS.finditer(chunk) if fits(match, found[0])]
    return REDIS.sub(lambda found: b"" if fits(match, found[0]) else found[0], chunk), len(pushes)


def postgres_messages(chunk: bytes) -> Iterator[bytes]:
    """The whole messages at the beginning: a letter or digit and four bytes of length, which count themselves."""
    at = 0
    while len(chunk) >= at + 5 and chunk[at : at + 1].isalnum():
        size = 1 + int.from_bytes(chunk[at + 1 : at + 5], "big")
        if size < 5 or len(chunk) < at + size:
            return
        yield chunk[at : at + size]
        at += size
