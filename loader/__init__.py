"""Bytes to tensors on a device: zero-copy views of the shared DRAM pool, or copies that follow the reader."""

from nearline.loader.attach import attach, load_directory, load_extents
from nearline.loader.checkpoint import LoadedCheckpoint
from nearline.loader.dtypes import TORCH_DTYPES
from nearline.loader.mapping import MappedPool

__all__ = ["TORCH_DTYPES", "LoadedCheckpoint", "MappedPool", "attach", "load_directory", "load_extents"]
