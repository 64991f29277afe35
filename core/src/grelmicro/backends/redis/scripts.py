"""The scripts that do the operations on a Redis record: one hash, in one step, by the server's clock.

Times are microseconds since 1970, which Lua's numbers hold exactly. A record is free when it has no holder. Errors are
returned and not raised, so that their first word is the server's own on every version; and everything that may fail
comes before or with the first change, so that an error means that nothing was changed.
"""

from collections.abc import Sequence
from hashlib import sha1

from grelmicro.leases.marks import MARK, MARK_AGAIN, SEVERAL

Argument = bytes | str | int

LATE = -1
"""The first item of the answer to an acquire that came after its time."""

DONE = 1
"""The answer to a release that released; another one is the time."""

READ_RECORD = """
local key, holder, me = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local record = redis.pcall('HMGET', key, 'holder', 'fence', 'transitions', 'acquired_at', 'renewed_at',
  'expires_at', 'incarnation', 'data', 'waiter', 'waited_at')
if record.err then return record end
local owner, fence = record[1] or '', tonumber(record[2])
local transitions = tonumber(record[3]) or 0
local acquired_at, renewed_at = tonumber(record[4]) or 0, tonumber(record[5]) or 0
local expires_at, data = tonumber(record[6]) or 0, record[8] or ''
local live = fence and owner ~= '' and expires_at >= now
local waiter, waited_at = record[9] or '', tonumber(record[10]) or 0
local marked = waiter ~= '' and waited_at <= now and now - waited_at <= MARK

local function text(number)
  return string.format('%.0f', number)
end

local refusal
local function write(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    refusal = reply
    return false
  end
  return true
end

local function answer(flag)
  local waited = marked and waiter ~= me and 1 or 0
  return {flag, owner, fence or 0, transitions, acquired_at, renewed_at, expires_at, now, data, waited}
end
""".replace("MARK", str(round(MARK * 1e6)))

# A key that holds something else holds no lease: it was lost, like one that was deleted.
IF_OWNED = """
if record.err then
  if string.find(record.err, 'WRONGTYPE', 1, true) then return false end
  return record
end
"""
OWNED = """
if not (live and owner == holder and (ARGV[3] == '0' or ARGV[3] == record[2])) then return false end
"""

# A message only when another process waits: the releasing one wakes its own waiters itself. That it cannot be sent, as
# when the user has no right to the channel, must not fail the operation.
WAKE = """
if marked and waiter ~= me then redis.pcall('PUBLISH', key, '') end
"""

# The incarnation is what changes whenever the server may have lost writes: it is started, or another one is promoted.
# Where it is not told, every fence comes from the clock.
GRANT = """
local function begin_term(new_owner)
  local info = redis.pcall('INFO', 'replication')
  local incarnation = type(info) == 'string' and string.match(info, 'master_replid:(%x+)') or ''
  if not fence then
    fence = now
  else
    if owner ~= new_owner then transitions = transitions + 1 end
    fence = fence + 1
    if (incarnation == '' or incarnation ~= record[7]) and fence < now then fence = now end
  end
  acquired_at = now
  record[7] = incarnation
end

local function grant(new_owner, ttl)
  owner, renewed_at, expires_at = new_owner, now, now + ttl
  if waiter == me then waiter, marked = '', false end
  return write('HSET', key, 'holder', owner, 'fence', text(fence), 'transitions', text(transitions),
    'acquired_at', text(acquired_at), 'renewed_at', text(renewed_at), 'expires_at', text(expires_at),
    'incarnation', record[7] or '', 'data', data, 'waiter', waiter, 'waited_at', text(waited_at))
end
"""

ACQUIRE = (
    """
local ttl, waiting, new_data = tonumber(ARGV[3]), ARGV[5], ARGV[6]
if now > tonumber(ARGV[4]) then return {LATE, now} end

if live and owner ~= holder then
  local mark
  if waiting == '1' then
    if not marked then
      mark = me
    elseif waiter ~= me and waiter ~= 'SEVERAL' then
      mark = 'SEVERAL'
    elseif now - waited_at > AGAIN then
      mark = waiter
    end
  end
  if mark then
    -- A mark must be possible also when memory is full; after a write that needs none, the next one is let through.
    if not (write('PERSIST', key) and write('HSET', key, 'waiter', mark, 'waited_at', text(now))) then
      return refusal
    end
    waiter, marked = mark, true
  end
  return answer(0)
end

if not live then begin_term(holder) end
data = new_data or data
if not grant(holder, ttl) then return refusal end
if not live then redis.pcall('PERSIST', key) end
return answer(1)
""".replace("LATE", str(LATE))
    .replace("SEVERAL", SEVERAL)
    .replace("AGAIN", str(round(MARK_AGAIN * 1e6)))
)

# PERSIST changes nothing here, for what is held lives on; but after it, the server takes the next write although its
# memory is full.
RENEW = """
local shortened = now + tonumber(ARGV[4]) < expires_at and 1 or 0
renewed_at, expires_at, data = now, now + tonumber(ARGV[4]), ARGV[5] or data
if not (write('PERSIST', key) and write('HSET', key, 'renewed_at', text(renewed_at), 'expires_at', text(expires_at),
    'data', data)) then
  return refusal
end
"""

# HDEL needs no memory, so that a full one never keeps a lease from ending.
VACATE = """
if not write('HDEL', key, 'holder', 'expires_at') then return refusal end
if new_data and not write('HSET', key, 'data', new_data) then return refusal end
if retention ~= '0' and (new_data or data) == '' then redis.pcall('PEXPIRE', key, retention) end
"""


class Script:
    """A script on one key, to be run by its digest or as it is."""

    def __init__(self, *parts: str) -> None:
        self.source = "".join(parts).encode()
        self.digest = sha1(self.source, usedforsecurity=False).hexdigest().encode()

    def call(self, key: bytes, arguments: Sequence[Argument]) -> bytes:
        """The command that runs it, if the server knows it."""
        return pack(b"EVALSHA", self.digest, b"1", key, *arguments)

    def full_call(self, key: bytes, arguments: Sequence[Argument]) -> bytes:
        """The command that runs it, and lets the server know it."""
        return pack(b"EVAL", self.source, b"1", key, *arguments)


def pack(*arguments: Argument) -> bytes:
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        if not isinstance(argument, bytes):
            argument = str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(argument), argument))
    return b"".join(parts)


_READ_OWNED = READ_RECORD.replace("\nif record.err then return record end\n", IF_OWNED)

acquire = Script(READ_RECORD, GRANT, ACQUIRE)
"""Arguments: holder, me, ttl, latest time, `1` for a waiter, and the new data if there is some."""

renew = Script(_READ_OWNED, OWNED, RENEW, "if shortened == 1 then", WAKE, "end\nreturn answer(shortened)\n")
"""Arguments: holder, me, fence, ttl, and the new data if there is some."""

release = Script(
    _READ_OWNED,
    OWNED.replace("return false", "return now"),
    "local retention, new_data = ARGV[4], ARGV[5]\n",
    VACATE,
    WAKE,
    f"return {DONE}\n",
)
"""Arguments: holder, me, fence, milliseconds to keep the record (0: for good), and the new data if there is some."""

# PERSIST as for a renewal. Nothing is published: the lease is free for no moment.
pass_on = Script(
    _READ_OWNED,
    f"if now > tonumber(ARGV[6]) then return {{{LATE}, now}} end",
    OWNED,
    GRANT,
    "begin_term(ARGV[4])\n",
    "if not (write('PERSIST', key) and grant(ARGV[4], tonumber(ARGV[5]))) then return refusal end\n",
    "return answer(1)\n",
)
"""Arguments: holder, me, fence, the next holder, its ttl, and the latest time."""

raise_fence = Script(
    _READ_OWNED,
    OWNED,
    "fence = math.max(fence, tonumber(ARGV[4]))\n",
    "if not (write('PERSIST', key) and write('HSET', key, 'fence', text(fence))) then return refusal end\n",
    "return answer(1)\n",
)
"""Arguments: holder, me, fence, and the least fence it shall have."""

vacate = Script(
    _READ_OWNED,
    "if owner == '' or live then return 0 end\nlocal retention, new_data = ARGV[3], ARGV[4]\n",
    VACATE,
    "return 1\n",
)
"""Sets a record free that expired. Arguments: nothing, nothing, milliseconds to keep the record, and the new data if
there is some."""

read = Script(READ_RECORD, "if not fence then return false end\nreturn answer(0)\n")
"""Arguments: nothing, and me."""
