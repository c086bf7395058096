"""Where weights lie while versions of them are built: here, or on a device, which they then never leave."""

from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import HostError
from etude.policy.device_hash import device_sums
from etude.weights.compiled import fastest_kernels
from etude.weights.digest import tensor_digest
from etude.weights.kernels import Kernels, T
from etude.weights.tensors import DTYPES, Flat, FlatTensor, unflatten
from etude.weights.torch_kernels import TorchKernels
from etude.weights.ulp import LAYOUTS


@runtime_checkable
class Memory(Protocol[T]):
    """A place for weights, and what is done to them there."""

    def empty(self, num_bytes: int) -> T:
        """Return bytes that are to be written."""
        ...

    def joined(self, parts: Sequence[T]) -> T:
        """Return a copy of bytes, one after the other."""
        ...

    def kernels(self, num_elements: int) -> Kernels[Any]:
        """Return the inner loops of the codec for that many elements that lie here."""
        ...

    def digest(self, data: T, dtype: str) -> str:
        """Return the digest of a whole tensor's bytes."""
        ...

    def tensor(self, flat: Flat[T]) -> Tensor:
        """Return the tensor; it shares the bytes' memory."""
        ...


class HostMemory:
    """Arrays."""

    def empty(self, num_bytes: int) -> NDArray[np.uint8]:
        """See `Memory`."""
        return np.empty(num_bytes, np.uint8)

    def joined(self, parts: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """See `Memory`."""
        return np.concatenate(parts)

    def kernels(self, num_elements: int) -> Kernels[Any]:
        """See `Memory`."""
        return fastest_kernels(num_elements)

    def digest(self, data: NDArray[np.uint8], dtype: str) -> str:
        """See `Memory`."""
        return tensor_digest(data, dtype)

    def tensor(self, flat: FlatTensor) -> Tensor:
        """See `Memory`."""
        return unflatten(flat)


class DeviceMemory:
    """Flat tensors of bytes on a torch device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, num_bytes: int) -> Tensor:
        """See `Memory`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Memory`."""
        return torch.cat(list(parts))

    def kernels(self, num_elements: int) -> Kernels[Any]:
        """See `Memory`."""
        return TorchKernels(num_elements)

    def digest(self, data: Tensor, dtype: str) -> str:
        """See `Memory`."""
        return device_sums(data, width=LAYOUTS[dtype].width).hex()

    def tensor(self, flat: Flat[Tensor]) -> Tensor:
        """See `Memory`."""
        if not len(flat.data):
            return torch.empty(flat.shape, dtype=DTYPES[flat.dtype], device=self._device)
        return flat.data.view(DTYPES[flat.dtype]).reshape(flat.shape)


HOST: Final = HostMemory()


def memory_of(device: str) -> Memory[Any]:
    """Return where weights for an engine on a torch device, `cpu` or `cuda`, are to lie.

    Raise `HostError` when there is no such device.
    """
    found = torch.device(device)
    if found.type == "cpu":
        return HOST
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        msg = (
            f"there is no device {device}: torch {torch.__version__} finds {count} GPUs on this host; set the pool's "
            f'device to "cpu", or install a torch that is built for the driver'
        )
        raise HostError(msg)
    return DeviceMemory(found)
