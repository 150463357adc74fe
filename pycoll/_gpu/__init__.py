"""Messages and schedules on arrays of GPUs: staged, by CUDA IPC, or by GPUDirect RDMA."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
