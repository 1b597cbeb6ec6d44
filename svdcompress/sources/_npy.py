"""Arrays of numbers from npy and npz files: a header's claims are checked against the file before anything is allocated."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.errors import DataError, shortened
from svdcompress.files import INFLATES, memory

_NUMBERS = "fiub"
_PIECE = 2**24
"""Bytes to read at a time."""


def load_npy(path: Path) -> Tensor:
    """The array of an npy file. Raises DataError for one that is damaged, truncated, or does not hold numbers."""
    try:
        with path.open("rb") as file:
            return _array(file, path.stat().st_size, str(path))
    except OSError as error:
        raise DataError(f"{path}: not a readable array of numbers ({error.strerror or error})") from error


def load_npz(path: Path) -> dict[str, Tensor]:
    """The arrays of an npz file by name. Raises DataError like `load_npy`, and for names that occur twice."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            names = [member.filename.removesuffix(".npy") for member in members]
            if len(set(names)) < len(names):
                raise DataError(f"{path}: contains two arrays of the same name")
            enough_memory(sum(member.file_size for member in members), str(path))
            found = {}
            for name, member in zip(names, members, strict=True):
                where = f"{path}, {shortened(name, 60)}"
                if member.flag_bits & 1:
                    raise DataError(f"{where}: encrypted")
                if member.file_size > INFLATES * (member.compress_size + 1024):
                    raise DataError(
                        f"{where}: damaged: {member.compress_size:,} compressed bytes cannot expand to {member.file_size:,}"
                    )
                with archive.open(member) as file:
                    found[name] = _array(file, member.file_size, where)
            return found
    except DataError:
        raise
    except Exception as error:  # zipfile's errors have no common base class
        reason = shortened(f"{type(error).__name__}: {error}")
        raise DataError(f"{path}: not readable arrays of numbers ({reason})") from error


def _array(file: IO[bytes], size: int, where: str) -> Tensor:
    """The array in an npy file of `size` bytes. Raises DataError like `load_npy`."""
    try:
        version = np.lib.format.read_magic(file)
        read: Any = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:  # 3.0 is for structured arrays with non-ASCII names
            raise ValueError(f"version {version} of the format is not for plain numbers")
        shape, fortran, dtype = read(file)
    except Exception as error:  # mostly ValueError; the parser raises others on noise
        raise DataError(f"{where}: not a readable array of numbers ({shortened(str(error))})") from error
    if dtype.kind not in _NUMBERS or dtype.hasobject or dtype.shape:
        raise DataError(f"{where}: an array of {shortened(str(dtype), 60)}; numbers are needed")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted > size:
        raise DataError(f"{where}: truncated: its header promises {wanted:,} bytes, but the file has {size:,}")
    enough_memory(wanted, where)
    content = bytearray()
    while len(content) < wanted and (piece := file.read(min(_PIECE, wanted - len(content)))):
        content += piece
    if len(content) < wanted or file.read(1):
        others = "fewer" if len(content) < wanted else "more"
        raise DataError(f"{where}: damaged: its header promises {wanted:,} bytes of numbers, but there are {others}")
    try:
        array = np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        raise DataError(f"{where}: an impossible shape: {shortened(str(shape), 60)} ({error})") from error
    return as_tensor(array, where)


def as_tensor(array: np.ndarray, where: str) -> Tensor:
    """An array of numbers, in any byte order, as a tensor: unsigned integers but bytes as int64, long doubles as float64.

    Raises DataError for anything but numbers, for a single number, and for values that float64 or int64 cannot hold.
    """
    if array.dtype.kind not in _NUMBERS:
        raise DataError(f"{where}: an array of {shortened(str(array.dtype), 60)}; numbers are needed")
    if array.ndim == 0:
        raise DataError(f"{where}: a single number; the first dimension counts examples")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        with np.errstate(over="ignore"):
            double = array.astype(np.float64)
        if (np.isinf(double) & ~np.isinf(array)).any():
            raise DataError(f"{where}: holds long doubles that float64 cannot hold")
        array = double
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise DataError(f"{where}: holds {int(array.max())}, which int64 cannot hold")
        array = array.astype(np.int64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def enough_memory(wanted: int, where: str) -> None:
    """Raises DataError if this machine does not have `wanted` bytes of memory free."""
    if wanted > (free := memory()):
        raise DataError(f"{where}: needs {wanted / 2**30:,.1f} GiB of memory, but this machine has {free / 2**30:,.1f} free")
