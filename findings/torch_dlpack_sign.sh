#!/usr/bin/env bash
# PyTorch: the imaginary part of a conjugated tensor, given to DLPack. Is it the same array?
#
# Guess: yes, or a refusal, as for the conjugated tensor itself and as `.numpy()` refuses it.
# Seen: neither. Such a view is stored with a bit that says "negated"; `__dlpack__()` hands out the
# memory without a word, and all signs are wrong.
. "$(dirname "$0")/compare.bash"
install torch==2.13.0 numpy==2.4.6
compare "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import numpy as np
import torch

x = torch.tensor([1 + 2j, 3 + 4j]).conj()

def attempt(function, value):
    try:
        return function(value).tolist()
    except (RuntimeError, BufferError) as error:
        return f"{type(error).__name__}: {error}"[:60]

print("the tensor:", x.imag.tolist())
print("numpy():", attempt(torch.Tensor.numpy, x.imag))
print("numpy.from_dlpack:", attempt(np.from_dlpack, x.imag))
print("torch.from_dlpack:", attempt(torch.from_dlpack, x.imag))
print("torch.from_dlpack, conjugated:", attempt(torch.from_dlpack, x))
PROGRAM
the tensor: [-2.0, -4.0]
numpy(): RuntimeError: Can't call numpy() on Tensor that has negative
numpy.from_dlpack: [2.0, 4.0]
torch.from_dlpack: [2.0, 4.0]
torch.from_dlpack, conjugated: BufferError: Can't export tensors with the conjugate bit set
EXPECTED
