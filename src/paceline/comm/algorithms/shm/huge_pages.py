"""Huge pages for ordinary tensors that peers reach again and again, such as the buckets of DDP.

The kernel copies between processes page by page: in pages of 2 MB a third faster than in pages of 4 KB.
Memory that is used once is left alone, because making a huge page of it costs a copy. What the kernel refuses
(an old one, no free huge page) changes nothing.
"""

from __future__ import annotations

import ctypes
from typing import Final, final

from torch import Tensor

_PAGE: Final = 2 << 20
_LEAST_BYTES: Final = 2 * _PAGE
_USES: Final = 3  # after which a tensor's memory is expected to stay
_MOST_KNOWN: Final = 256
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25  # Linux 6.1: at once, and not some time later in the background
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@final
class HugePages:
    """Counts how often tensors are reached, and asks for huge pages once for each that stays."""

    def __init__(self) -> None:
        self._uses: dict[tuple[int, int], int] = {}

    def use(self, tensor: Tensor) -> None:
        """Note that peers are about to reach a tensor's memory."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < _LEAST_BYTES:
            return
        place = (tensor.data_ptr(), nbytes)
        uses = self._uses.get(place, 0)
        if uses >= _USES:
            return
        if len(self._uses) >= _MOST_KNOWN:
            self._uses.clear()
        self._uses[place] = uses + 1
        if uses + 1 == _USES:
            _advise(*place)


def _advise(address: int, nbytes: int) -> None:
    """Ask for huge pages wherever a whole one lies inside the memory."""
    start, stop = -(-address // _PAGE) * _PAGE, (address + nbytes) // _PAGE * _PAGE
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        _libc.madvise(start, stop - start, advice)
