# SPDX-License-Identifier: Apache-2.0
"""The seams in the order of installation: all of them, or none but the guard."""

import logging
from dataclasses import dataclass

from polykv_vllm.errors import SeamError
from polykv_vllm.seams import (
    attention_backend,
    cache_salt,
    engine_config,
    key_treatment,
    kv_cache_dtype,
    layer_cache_dtype,
    metrics_registry,
    pool_requests,
    pool_reset,
    prefix_pool,
    scheduler,
    window_memory,
    window_pages,
    window_steps,
)
from polykv_vllm.seams.seam import Seam, SeamState

logger = logging.getLogger("vllm.polykv")

VLLM_VERSIONS = ">=0.32,<0.33"
"""The vLLM releases that the seams are written for."""

GUARD = engine_config.SEAM
"""Installed even when the others cannot be: it tells a user of our dtypes why."""

SEAMS: tuple[Seam, ...] = (
    kv_cache_dtype.SEAM,
    attention_backend.SEAM,
    layer_cache_dtype.SEAM,
    key_treatment.SEAM,
    metrics_registry.SEAM,
    scheduler.SEAM,
    prefix_pool.SEAM,
    pool_requests.SEAM,
    pool_reset.SEAM,
    cache_salt.SEAM,
    window_memory.SEAM,
    window_pages.SEAM,
    window_steps.SEAM,
    GUARD,
)

_failure: SeamError | None = None


@dataclass(frozen=True)
class SeamReport:
    """One row of the table of seams."""

    seam: Seam
    state: SeamState
    reason: str


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, None without one."""
    try:
        from vllm.version import __version__
    except ImportError:
        return None
    return str(__version__)


def report() -> list[SeamReport]:
    """Return each seam and its state in this process; installs nothing."""
    return [SeamReport(seam, *seam.inspect()) for seam in SEAMS]


def install() -> None:
    """Install every seam, or only the guard when vLLM is not the expected one.

    Never raises: vLLM would stop, also for users of its own dtypes. `require` raises.
    """
    global _failure
    _failure = _find_failure() or _install(SEAMS)
    if _failure is not None:
        logger.info("polykv is inactive: %s", _failure)
        _install((GUARD,))


def uninstall() -> None:
    """Remove every installed seam, the last one first."""
    for seam in reversed(SEAMS):
        if seam.inspect()[0] is SeamState.INSTALLED:
            seam.change.uninstall()


def failure() -> SeamError | None:
    """Return why the seams are not installed, None when they are."""
    return _failure


def require() -> None:
    """Raise unless the seams are installed.

    Raises:
        SeamError: vLLM is not the expected one; says what was found.

    """
    if _failure is not None:
        raise _failure


def _find_failure() -> SeamError | None:
    version = vllm_version()
    if not _is_supported(version):
        return SeamError(
            f"--kv-cache-dtype polykv needs vLLM {VLLM_VERSIONS}; installed: {version}"
        )
    changed = [row for row in report() if row.state is SeamState.CHANGED]
    if not changed:
        return None
    details = "; ".join(
        f"{row.seam.name} ({row.seam.target}): {row.reason}" for row in changed
    )
    return SeamError(
        f"--kv-cache-dtype polykv cannot be used: parts of vLLM {version} are not "
        f"those that polykv-vllm was written for. {details}. Install an unmodified "
        f"vLLM {VLLM_VERSIONS} or a newer polykv-vllm."
    )


def _is_supported(version: str | None) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version or "")
    except InvalidVersion:  # "dev": a source tree that was never built
        return False
    return SpecifierSet(VLLM_VERSIONS).contains(parsed, prereleases=True)


def _install(seams: tuple[Seam, ...]) -> SeamError | None:
    """Install the seams that are ready; on an error none of them stays."""
    for seam in seams:
        try:
            if seam.inspect()[0] is SeamState.READY:
                seam.change.install()
        except Exception as error:
            uninstall()
            return SeamError(
                f"--kv-cache-dtype polykv cannot be used: the seam {seam.name} could "
                f"not be installed ({type(error).__name__}: {error})"
            )
    return None
