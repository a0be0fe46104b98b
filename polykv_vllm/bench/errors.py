# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a benchmark, told apart by what happens next."""


class BenchError(RuntimeError):
    """Nothing can be measured; the message says what was asked and what is possible."""


class RunError(RuntimeError):
    """One run gave no figures; the other arms go on."""


class ArmError(RunError):
    """An arm cannot be served at all; the other arms go on."""
