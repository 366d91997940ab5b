"""Metal kernels of the backend, one file each: `select` restricts a layer's routing, `experts` runs what is left."""

from backends.mlx.kernels.experts import experts
from backends.mlx.kernels.selection import select

__all__ = ["experts", "select"]
