"""Device memory between processes: CUDA's driver API for legacy IPC, by ctypes, and torch for streams and events.

The driver rather than torch's own sharing of storages: that one opens files whose names the peer chooses, and counts
references that a peer which was killed never gives back. Memory that CUDA does not share this way (expandable segments,
SGLang's memory saver, custom pools) makes `share` raise; nothing is lent by this path then.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_basin.lending.buffers import HANDLE_BYTES

LIBRARY = "libcuda.so.1"

ENABLE_PEER_ACCESS = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the memory may be another GPU's, also one that CUDA_VISIBLE_DEVICES hides."""


class CudaError(RuntimeError):
    """The driver refused; the message has its own name of the error."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Driver:
    """The few calls that are needed, each in the primary context of one device, whatever thread it comes from."""

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        """`device`: as torch counts. Raises CudaError."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(str(error)) from None
        self._library.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        self._get_range = self._function(
            "cuMemGetAddressRange_v2", *(ctypes.POINTER(t) for t in (pointer, size)), pointer
        )
        self._get_handle = self._function("cuIpcGetMemHandle", ctypes.POINTER(_Handle), pointer)
        self._open_handle = self._function("cuIpcOpenMemHandle_v2", ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
        self._close_handle = self._function("cuIpcCloseMemHandle", pointer)
        self._push = self._function("cuCtxPushCurrent_v2", ctypes.c_void_p)
        self._pop = self._function("cuCtxPopCurrent_v2", ctypes.POINTER(ctypes.c_void_p))
        self._function("cuInit", ctypes.c_uint)(0)
        number = ctypes.c_int()
        self._function("cuDeviceGet", ctypes.POINTER(ctypes.c_int), ctypes.c_int)(ctypes.byref(number), device)
        self._context = ctypes.c_void_p()
        retain = self._function("cuDevicePrimaryCtxRetain", ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
        retain(ctypes.byref(self._context), number)

    def share(self, address: int) -> tuple[bytes, int, int]:
        """The allocation that `address` lies in: its handle, its size, and where in it the address is."""
        with self._current():
            base, size = self._range(address)
            handle = _Handle()
            self._get_handle(ctypes.byref(handle), base)
        return bytes(handle), size, address - base

    def open(self, handle: bytes) -> tuple[int, int]:
        """Map an allocation of another process: its address here, and its true size. Each handle once, until closed."""
        mapped = ctypes.c_uint64()
        with self._current():
            self._open_handle(ctypes.byref(mapped), _Handle.from_buffer_copy(handle), ENABLE_PEER_ACCESS)
            try:
                base, size = self._range(mapped.value)
            except CudaError:
                self._close_handle(mapped.value)
                raise
        return base, size

    def close(self, address: int) -> None:
        """Unmap what `open` mapped at this address; nothing may be reading it."""
        with self._current():
            self._close_handle(address)

    def _range(self, address: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._get_range(ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._push(self._context)
        try:
            yield
        finally:
            self._pop(ctypes.byref(ctypes.c_void_p()))

    def _function(self, name: str, *arguments: Any) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int

        def call(*given: Any) -> None:
            if (status := function(*given)) != 0:
                text = ctypes.c_char_p()
                self._library.cuGetErrorName(status, ctypes.byref(text))
                raise CudaError(f"{name}: {(text.value or str(status).encode()).decode()}")

        return call


class CudaDevice:
    """One GPU of this process: its memory, and a stream for copies beside its compute."""

    def __init__(self, device: int) -> None:
        """Raises CudaError."""
        self.device = torch.device("cuda", device)
        self.uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self.driver = Driver(device)
        self._stream: torch.cuda.Stream | None = None

    def view(self, address: int, size_bytes: int) -> torch.Tensor:
        """Bytes at an address that this GPU can read, as a tensor that owns nothing."""
        return view(self.device, address, size_bytes)

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Bytes of this GPU's memory, of the current stream."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is launched within runs on the side stream: before prefill's kernels where both could start."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=-1)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """An event behind everything launched so far on the current stream; waiting for it lets other threads run."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event


def view(device: torch.device, address: int, size_bytes: int) -> torch.Tensor:
    """A tensor of bytes over memory that others own. torch is not asked where the memory is: mapped memory of another
    GPU counts as this one's, since this one reads it."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size_bytes,), (1,))
