"""What scripts that share arrays begin with."""

from __future__ import annotations

USE = """
import gc, multiprocessing
from pycoll._runtime import shared_arrays
from pycoll._runtime.shared_arrays import is_shared, use

def pages():
    "Bytes of this host's memory file that take memory."
    fd = int(os.environ["PYCOLL_SHM"].split(":")[0])
    return os.fstat(fd).st_blocks * 512
"""
