"""What users hold: a communicator, and a grid, which is one."""
