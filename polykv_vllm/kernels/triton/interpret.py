# SPDX-License-Identifier: Apache-2.0
"""For tests and checks on a CPU: Triton's interpreter without its largest cost."""

from typing import Any


def speed_up_interpreter() -> None:
    """Let device functions be called without looking for what to patch each time.

    The interpreter scans its own modules at every call of a device function, a
    millisecond each; the launch of the kernel has patched what it would find.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__globals__
        if id(names) not in patched and any(v is tl.core for v in names.values()):
            interpreter._patch_lang(self.fn)
            patched.add(id(names))
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
