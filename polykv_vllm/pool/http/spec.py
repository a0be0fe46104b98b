# SPDX-License-Identifier: Apache-2.0
"""What a prefix is asked for with: in the body of a request, or in a file at start."""

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polykv_vllm.errors import OptionError
from polykv_vllm.pool.pins import MAX_TTL_S, NAME


class PromptSpec(BaseModel):
    """The beginning of a prompt: a text, or messages for the chat template.

    Attributes:
        text: As in `/v1/completions`.
        messages: As in `/v1/chat/completions`.
        tools: Likewise; with messages only.

    """

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(default=None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools belong to messages")
        if not all(_is_text(message.get("content")) for message in self.messages or ()):
            raise ValueError("messages of a prefix have text only: no images or audio")
        return self


def _is_text(content: Any) -> bool:
    """Whether a message's content is text: what else there is would be fetched."""
    if isinstance(content, list):
        return all(isinstance(p, dict) and p.get("type") == "text" for p in content)
    return content is None or isinstance(content, str)


class PrefixSpec(PromptSpec):
    """A prefix to compute and pin.

    Attributes:
        name: Letters, digits and ".", "_", "-"; unique for a salt.
        ttl_s: Seconds after which it is unpinned unless a request begins with it.
        pin: Whether to pin it; else it is only computed.

    """

    name: str = Field(pattern=NAME)
    ttl_s: float | None = Field(default=None, gt=0, le=MAX_TTL_S)
    pin: bool = True


class FilePrefix(PrefixSpec):
    """A prefix in a file.

    Attributes:
        cache_salt: Of the requests that may use it; None: those without one.
        public: Whether requests of every salt share it; only a file can say so.

    """

    cache_salt: str | None = Field(default=None, min_length=1)
    public: bool = False

    @model_validator(mode="after")
    def _public_has_no_salt(self) -> Self:
        if self.public and (self.cache_salt is not None or not self.pin):
            raise ValueError("a public prefix is pinned and has no cache_salt")
        return self


class PrefixFile(BaseModel):
    """A file of prefixes."""

    model_config = ConfigDict(extra="forbid")

    prefixes: list[FilePrefix]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        keys = [(prefix.cache_salt, prefix.name) for prefix in self.prefixes]
        if twice := {name for salt, name in keys if keys.count((salt, name)) > 1}:
            raise ValueError(f"named twice: {', '.join(sorted(twice))}")
        return self


def read_prefix_file(path: str) -> list[FilePrefix]:
    """Read a YAML or JSON file of prefixes.

    Raises:
        OptionError: It cannot be read, or is not such a file; says what is wrong.

    """
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
        return PrefixFile.model_validate(content).prefixes
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}"
            for e in error.errors()
        )
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        found = str(error)
    raise OptionError(
        f"the option pool.prefixes={path!r}: {found}. The file has a list `prefixes` "
        "of mappings with `name`, `text` or `messages`, and optionally `tools`, "
        "`ttl_s`, `pin`, `cache_salt`, `public`"
    )
