"""The provider of the Redis store."""

from grelmicro.backends.redis import RedisProvider

__all__ = ["RedisProvider"]
