"""`FileMapping`: a file's bytes in memory, without a descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class FileMapping:
    """Maps a whole file for reading, until the object is collected.

    `mmap.mmap` and Arrow's memory maps each keep a descriptor open, and a process may have 1,024 by default. A reader maps a growing file again for
    every part that was added, and keeps a mapping as long as it uses anything read through it. Linux allows 65,530 mappings (vm.max_map_count).

    Args:
        descriptor: of a file that is not empty; it may be closed afterwards.

    Attributes:
        address: of the first byte.
        size: bytes.
        inode: device and number of the file, which may get another name or none.

    Raises:
        OSError: the file cannot be mapped.
    """

    _unmap = _LIBC.munmap  # here, because at exit the module may be empty before the last object is collected

    def __init__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.size, self.inode = status.st_size, (status.st_dev, status.st_ino)
        address = _LIBC.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address: int = address

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._unmap(self.address, self.size)
