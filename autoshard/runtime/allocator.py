"""How the C library's allocator treats what a step frees.

Every step allocates and frees the same large buffers. By default glibc gives such memory
back to the system, and the next step pays for mapping and clearing it again, page by page.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MIB = 2**20


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for its next step.

    Its peak stays what it is. Does nothing where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    # Larger blocks, such as tables, are still mapped one by one.
    library.mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    library.mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB)
