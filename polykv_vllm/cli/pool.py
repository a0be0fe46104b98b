# SPDX-License-Identifier: Apache-2.0
"""`polykv pool`: the prefixes of a running server."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import typer
from rich.console import Console

from polykv_vllm.cli.common import fail, table_console
from polykv_vllm.pool.http import ROOT, SALT_HEADER
from polykv_vllm.reporting.table import Table

_POLL_S, _POLL_TIMEOUT_S = 0.5, 5.0
_TIMEOUT_S = 600.0  # a long prefix takes a while to compute

pool = typer.Typer(
    help="Named prefixes of a running server: computed once, pinned in its cache. The "
    "server must have been started with VLLM_PLUGINS=polykv.",
    no_args_is_help=True,
)

Url = Annotated[str, typer.Option("--url", help="Where the server listens.")]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar="VLLM_API_KEY", help="The server's API key."),
]
Salt = Annotated[
    str | None,
    typer.Option("--salt", help="cache_salt of the requests that it is about."),
]
Wait = Annotated[
    float,
    typer.Option("--wait", help="Seconds to wait until the server is up.", min=0),
]
Name = Annotated[str, typer.Argument(help="Name of the prefix.")]
Text = Annotated[
    str | None, typer.Option(help="The prompt's beginning, as in /v1/completions.")
]
System = Annotated[
    str | None, typer.Option(help="A system message, for the chat template.")
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="A text file; or JSON with a list of messages, or with a mapping that has "
        "messages and tools.",
        exists=True,
        dir_okay=False,
    ),
]
_URL = "http://127.0.0.1:8000"


@pool.command("ls")
def list_prefixes(
    url: Url = _URL, api_key: Key = None, salt: Salt = None, wait: Wait = 0
) -> None:
    """List prefixes: pinned or not, bytes, readers now, hits, time left."""
    _wait_for(url, wait)
    found = _call("GET", "/prefixes", url, api_key, salt)["prefixes"]
    if not found:
        print("no prefixes")
        return
    table = Table(
        "Prefixes",
        [
            *("name", "state", "where", "tokens", "pinned", "KB", "readers", "hits"),
            *("age", "left"),
        ],
        words=3,
        rows=[_row(prefix) for prefix in found],
    )
    table.print(table_console())


@pool.command()
def warm(
    name: Name,
    text: Text = None,
    system: System = None,
    file: PromptFile = None,
    ttl: Annotated[
        float | None,
        typer.Option(help="Seconds until it is unpinned unless it is hit.", min=1),
    ] = None,
    no_pin: Annotated[
        bool, typer.Option("--no-pin", help="Compute it only; give it no name.")
    ] = False,
    url: Url = _URL,
    api_key: Key = None,
    salt: Salt = None,
    wait: Wait = 0,
) -> None:
    """Compute a prefix and pin it."""
    _wait_for(url, wait)
    body = {"name": name, "pin": not no_pin} | _prompt(text, system, file)
    body |= {} if ttl is None else {"ttl_s": ttl}
    _say(_call("POST", "/prefixes", url, api_key, salt, body))


@pool.command()
def pin(name: Name, url: Url = _URL, api_key: Key = None, salt: Salt = None) -> None:
    """Pin a known prefix again; what is missing is computed."""
    _say(_call("POST", f"/prefixes/{quote(name)}/pin", url, api_key, salt))


@pool.command()
def unpin(name: Name, url: Url = _URL, api_key: Key = None, salt: Salt = None) -> None:
    """Unpin a prefix; its name stays."""
    _say(_call("POST", f"/prefixes/{quote(name)}/unpin", url, api_key, salt))


@pool.command("rm")
def remove(name: Name, url: Url = _URL, api_key: Key = None, salt: Salt = None) -> None:
    """Unpin a prefix and forget its name."""
    _call("DELETE", f"/prefixes/{quote(name)}", url, api_key, salt)
    print(f"{name}: removed")


@pool.command()
def explain(
    text: Text = None,
    system: System = None,
    file: PromptFile = None,
    url: Url = _URL,
    api_key: Key = None,
    salt: Salt = None,
    wait: Wait = 0,
) -> None:
    """Say what of a prompt is in the cache, and where it leaves each prefix."""
    _wait_for(url, wait)
    body = _prompt(text, system, file)
    found = _call("POST", "/explain", url, api_key, salt, body)
    for line in explanation(found):
        print(line)


@pool.command()
def ui(
    port: Annotated[
        int, typer.Option(help="Where to listen; 0 takes a free port.", min=0)
    ] = 0,
    url: Url = _URL,
    api_key: Key = None,
    salt: Salt = None,
) -> None:
    """Show the prefixes in a browser: serves a page on this machine until Ctrl-C.

    The page is at /v1/polykv/ui of the server, too. But a browser sends no API key when
    it opens an address, so a server that has one refuses it there.
    """
    from polykv_vllm.pool.http.local import PageServer

    try:
        server = PageServer(url, api_key, salt, port)
    except OSError as error:
        raise fail(f"port {port} cannot be had: {error.strerror}") from None
    with server:
        print(f"open {server.url}  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def explanation(found: Mapping[str, Any]) -> list[str]:
    """Return what `explain` prints, line by line."""
    tokens, size = found["tokens"], found["block_size"]
    in_memory, on_disk = found["hit_tokens"], found["disk_tokens"]
    lines = [f"{tokens} tokens: {in_memory} are in memory and {on_disk} more on disk"]
    if tokens < size:
        lines.append(
            f"a block has {size} tokens: a shorter prompt never hits (a smaller "
            "--block-size may be possible)"
        )
    for prefix in found["prefixes"]:
        line = (
            f"{prefix['name']}: {prefix['shared_tokens']} of {prefix['tokens']} tokens "
            "in whole blocks"
        )
        if prefix["below_a_block_tokens"]:
            line += f", and {prefix['below_a_block_tokens']} below a block"
        lines.append(line)
        if place := prefix["diverges"]:
            lines.append(
                f"  differs at token {place['position']}: {place['token']!r}, in "
                f"{place['before'] + '⟨here⟩' + place['after']!r}"
            )
    return lines


def _row(prefix: Mapping[str, Any]) -> list[str]:
    if "hits" not in prefix:  # somebody else's, and public
        size = str(prefix["tokens"])
        return [prefix["name"], f"{prefix['state']}, public", "", size, *[""] * 6]
    left = prefix["expires_in_s"]
    return [
        prefix["name"],
        prefix["state"],
        ", ".join(prefix["tiers"]),
        str(prefix["tokens"]),
        str(prefix["pinned_tokens"]),
        f"{prefix['physical_bytes'] / 1e3:.0f}",
        str(prefix["readers"]),
        str(prefix["hits"]),
        f"{prefix['age_s']:.0f} s",
        "" if left is None else f"{left:.0f} s",
    ]


def _say(prefix: Mapping[str, Any]) -> None:
    text = f"{prefix['name']}: {prefix['state']}, {prefix['tokens']} tokens"
    if "pinned_tokens" in prefix:
        text += f", {prefix['pinned_tokens']} of them pinned"
        text += f" in {prefix['physical_bytes'] / 1e3:.0f} KB"
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


def _prompt(text: str | None, system: str | None, file: Path | None) -> dict[str, Any]:
    given = [value for value in (text, system, file) if value is not None]
    if len(given) != 1:
        raise fail("give one of --text, --system and --file")
    if text is not None:
        return {"text": text}
    if system is not None:
        return {"messages": [{"role": "system", "content": system}]}
    assert file is not None
    content = file.read_text()
    if file.suffix != ".json":
        return {"text": content}
    try:
        found = json.loads(content)
    except ValueError as error:
        raise fail(f"{file}: {error}") from None
    return {"messages": found} if isinstance(found, list) else dict(found)


def _wait_for(url: str, seconds: float) -> None:
    """Return when the server is up, or when it was waited for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urlopen(f"{url.rstrip('/')}/health", timeout=_POLL_TIMEOUT_S).close()
            return
        except (OSError, ValueError):
            time.sleep(_POLL_S)


def _call(
    method: str,
    path: str,
    url: str,
    api_key: str | None,
    salt: str | None,
    body: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Ask the server; ends the command when it refuses."""
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
    headers |= {SALT_HEADER: salt} if salt else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + ROOT + path, data, headers, method=method)
        with urlopen(request, timeout=_TIMEOUT_S) as reply:
            return dict(json.load(reply))
    except HTTPError as error:
        raise fail(_refusal(error)) from None
    except (OSError, ValueError) as error:
        raise fail(f"{url} does not answer: {error}") from None


def _refusal(error: HTTPError) -> str:
    text = error.read().decode(errors="replace")
    if error.code == 404 and "error" not in text:
        return (
            "the server has no such route: start it with VLLM_PLUGINS=polykv and "
            "--kv-cache-dtype polykv"
        )
    if error.code == 401:
        return "the server wants its API key: --api-key, or VLLM_API_KEY"
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}: {text[:500]}"
