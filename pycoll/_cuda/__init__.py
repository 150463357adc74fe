"""CUDA: arrays on a GPU, copies of them, and page-locked memory to stage them in."""
