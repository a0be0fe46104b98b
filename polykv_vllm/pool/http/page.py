# SPDX-License-Identifier: Apache-2.0
"""The page that shows the prefixes of a running server, and how it is served.

One file without data: it asks the route beside it, `prefixes`, again and again. The
policy lets a browser run what is written in it and ask its own server, nothing else.
"""

import base64
import hashlib
import re
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)

PAGE = _FILE.read_bytes()


def _policy(page: bytes) -> str:
    digests: dict[str, str] = {}
    for kind, text in _INLINE.findall(page):
        found = base64.b64encode(hashlib.sha256(text).digest()).decode()
        digests[kind.decode()] = found
    return "; ".join(
        [
            "default-src 'none'",
            *(f"{kind}-src 'sha256-{found}'" for kind, found in digests.items()),
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


HEADERS = {
    "Content-Security-Policy": _policy(PAGE),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""What goes with the page, beside its type and length."""
