"""Rate limit of each client: requests and tokens per minute, as token buckets in a table of bounded size.

A bucket holds at most the amount of one minute and is refilled evenly. The tokens that a request may have at most are
reserved once they are known, and the tokens that it had are taken at its end. A request is admitted if it fits beside
the reservations of others, or if it is alone and any token is left; so a request of more than a minute's amount is
served too, and the bucket becomes negative.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

from app.errors import RateLimited

SECONDS = 60.0
# Clients that are remembered, at some 500 bytes each.
MAX_CLIENTS = 10_000


class ClientAccount(Protocol):
    """What a client has used: `Account`, or one that another process keeps."""

    async def reserve(self, num_tokens: int) -> None: ...

    def settle(self, num_reserved: int, num_tokens: int) -> None: ...


class Bucket:
    __slots__ = ("_left", "_limit", "_updated_at")

    def __init__(self, limit: int, now: float) -> None:
        self._limit, self._left, self._updated_at = limit, float(limit), now

    def left(self, now: float) -> float:
        refilled = self._left + (now - self._updated_at) * self._limit / SECONDS
        self._left, self._updated_at = min(refilled, float(self._limit)), now
        return self._left

    def is_full(self, now: float) -> bool:
        """Return True if nothing was taken for long enough."""
        return self.left(now) >= self._limit

    def take(self, amount: float) -> None:
        self._left -= amount

    def seconds_until(self, amount: float, now: float) -> float:
        return max(amount - self.left(now), 0.0) * SECONDS / self._limit


class Account:
    __slots__ = ("_clock", "_num_reserved", "_requests", "_tokens")

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float]) -> None:
        now = clock()
        self._clock, self._num_reserved = clock, 0
        self._requests = None if requests is None else Bucket(requests, now)
        self._tokens = None if tokens is None else Bucket(tokens, now)

    def admit(self) -> None:
        """Take one request. Raises `RateLimited` if no request or no token is left."""
        now = self._clock()
        if self._tokens is not None and self._tokens.left(now) <= 0:
            raise _limited("tokens", self._tokens.seconds_until(1.0, now))
        if self._requests is not None:
            if self._requests.left(now) < 1:
                raise _limited("requests", self._requests.seconds_until(1.0, now))
            self._requests.take(1)

    async def reserve(self, num_tokens: int) -> None:
        """Reserve the most tokens of a request until `settle`. Raises `RateLimited` if they do not fit."""
        if self._tokens is None:
            return
        now = self._clock()
        wanted = num_tokens + self._num_reserved if self._num_reserved else 1
        if self._tokens.left(now) < wanted:
            raise _limited("tokens", min(self._tokens.seconds_until(wanted, now), SECONDS))
        self._num_reserved += num_tokens

    def settle(self, num_reserved: int, num_tokens: int) -> None:
        """Take the tokens of a request that has ended, in place of its reservation."""
        if self._tokens is not None:
            self._num_reserved -= num_reserved
            self._tokens.left(self._clock())
            self._tokens.take(num_tokens)

    @property
    def is_untouched(self) -> bool:
        """True if the account is as good as a new one."""
        now = self._clock()
        return not self._num_reserved and all(
            bucket is None or bucket.is_full(now) for bucket in (self._requests, self._tokens)
        )


class RateLimiter:
    """Accounts of the clients, by key or address. Used on the event loop only.

    If the table is full of clients that used something in the last minute, all further ones share one account: nobody
    gets a new allowance by coming from many addresses.
    """

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._tokens, self._clock = requests, tokens, clock
        self._accounts: OrderedDict[Hashable, Account] = OrderedDict()
        self._others = self._new()

    def __len__(self) -> int:
        return len(self._accounts)

    async def admit(self, client: Hashable) -> Account:
        """Take one request of the client and return its account. Raises `RateLimited`."""
        account = self.account(client)
        account.admit()
        return account

    def account(self, client: Hashable) -> Account:
        account = self._accounts.get(client)
        if account is not None:
            self._accounts.move_to_end(client)
            return account
        if len(self._accounts) >= MAX_CLIENTS:
            oldest = next(iter(self._accounts))
            if not self._accounts[oldest].is_untouched:
                return self._others
            del self._accounts[oldest]
        account = self._accounts[client] = self._new()
        return account

    def _new(self) -> Account:
        return Account(self._requests, self._tokens, self._clock)


def _limited(what: str, seconds: float) -> RateLimited:
    return RateLimited(
        f"The limit of {what} per minute for this client is reached: try again in {max(seconds, 1.0):.0f} s.",
        retry_after_seconds=seconds,
    )
