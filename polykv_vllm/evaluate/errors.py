# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an evaluation, told apart by what happens next."""


class EvalError(RuntimeError):
    """Nothing can be measured; the message says what was asked and what is possible."""


class EngineError(RuntimeError):
    """The engine of one arm failed; the other arms go on."""
