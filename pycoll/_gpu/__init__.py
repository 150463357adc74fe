"""Messages and schedules on arrays of GPUs: staged, by CUDA IPC, or by GPUDirect RDMA."""
