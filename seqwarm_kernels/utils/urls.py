"""URLs in messages: without the credentials that they may hold."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^\s/]*@")
#: The query of HTTP, which may hold a signature. A quote ends it, unless it goes on.
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*\?)(?:[^\s'\"<>]|['\"](?=[\w%&=.+/-]))*")


def without_secrets(text: str) -> str:
    """`text` with *** for the users, passwords and queries of its URLs."""
    return _QUERY.sub(r"\1***", _USER.sub("***@", text))
