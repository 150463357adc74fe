#!/usr/bin/env bash
# PaddlePaddle's tensors: what does `__dlpack_device__()` say, and what is bfloat16 in NumPy?
#
# Guess: two integers, as the array API standard has it, and the numbers, or a refusal.
# Seen: the device's number is None on the processor, though numpy.from_dlpack takes the tensor; and
# numpy.asarray gives the bits of bfloat16 as integers, so that a sum of them is nonsense.
. "$(dirname "$0")/compare.bash"
install paddlepaddle==3.3.1 numpy==2.4.6
compare "$python" -W ignore program.py 3<<'PROGRAM' <<'EXPECTED'
import numpy as np
import paddle

x = paddle.to_tensor([1.0, 2.0])
kind, number = x.__dlpack_device__()
print("device:", int(kind), number)
print("numpy.from_dlpack:", np.from_dlpack(x))
half = np.asarray(x.astype("bfloat16"))
print("numpy.asarray of bfloat16:", half.dtype, half)
PROGRAM
device: 1 None
numpy.from_dlpack: [1. 2.]
numpy.asarray of bfloat16: uint16 [16256 16384]
EXPECTED
