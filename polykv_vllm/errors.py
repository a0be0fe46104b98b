# SPDX-License-Identifier: Apache-2.0
"""The errors this package raises at its boundary with vLLM."""


class PolyKVError(RuntimeError):
    """Base class; the message says what was asked, why not, and what is possible."""


class UnsupportedError(PolyKVError):
    """The model, the platform or a setting cannot be served with our formats."""


class OptionError(PolyKVError):
    """An option under `additional_config["polykv"]` is unknown or ill-typed."""


class SeamError(PolyKVError):
    """vLLM is not what the seams were written for."""
