"""Which part of a whole tensor a rank holds: a box, and whether this rank answers for it.

Everything that looks at a spread model from outside (the gradient norm, checkpoints, ``verify``)
sees it as such pieces: the pieces that are owned tile every tensor of the whole model once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Piece:
    """One rank's part of a named tensor.

    Attributes:
        tensor: the part itself, a plain tensor that shares memory with the model.
        shape: of the whole tensor.
        start: where the part begins in it, one number per dimension.
        owned: whether this rank answers for it; of equal parts on several ranks one is owned.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    owned: bool = True

    @property
    def box(self) -> tuple[slice, ...]:
        """The part as an index into the whole tensor."""
        return tuple(
            slice(first, first + length)
            for first, length in zip(self.start, self.tensor.shape, strict=True)
        )


def whole(tensor: Tensor) -> Piece:
    """A tensor that is not divided."""
    return Piece(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be a ``DTensor``, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offset(tensor: Tensor) -> tuple[int, ...]:
    """Where :func:`local` begins in the tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start)
