# SPDX-License-Identifier: Apache-2.0
"""The error of calibrating, and of reading what a calibration left."""

from polykv_vllm.errors import PolyKVError


class CalibrationError(PolyKVError):
    """A text, a model or a calibration file cannot be used; the message says why."""
