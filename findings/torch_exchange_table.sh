#!/usr/bin/env bash
# DLPack 1.3's table of C functions, of PyTorch: does it refuse what `__dlpack__()` refuses?
#
# Guess: yes; it is the same export without Python.
# Seen: no. The function that describes a tensor succeeds for a conjugated one, and for one that
# requires a gradient. Who reads a tensor by it must look at `is_conj()` and `is_neg()` itself.
. "$(dirname "$0")/compare.bash"
install torch==2.13.0 numpy==2.4.6
compare "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import ctypes
import torch

class Table(ctypes.Structure):  # DLPackExchangeAPI
    _fields_ = [("version", ctypes.c_uint32 * 2), ("previous", ctypes.c_void_p)] + [
        (name, ctypes.c_void_p) for name in ("allocate", "export", "import_", "describe", "stream")
    ]

class Described(ctypes.Structure):  # DLTensor
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
capsule = torch.Tensor.__dlpack_c_exchange_api__
table = Table.from_address(pointer(capsule, b"dlpack_exchange_api"))
kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Described))
describe = kind(table.describe)
print("version", *table.version)
for name, x in {
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "requires a gradient": torch.ones(2, requires_grad=True),
}.items():
    described = Described()
    status = describe(x, ctypes.byref(described))
    numbers = list((ctypes.c_float * 2).from_address(described.data))
    try:
        x.__dlpack__()
        said = "exported"
    except BufferError as error:
        said = str(error)
    print(f"{name}: status {status}, {numbers}; __dlpack__(): {said}")
PROGRAM
version 1 3
conjugated: status 0, [1.0, 2.0]; __dlpack__(): Can't export tensors with the conjugate bit set
requires a gradient: status 0, [1.0, 1.0]; __dlpack__(): Can't export tensors that require gradient, use tensor.detach()
EXPECTED
