"""The calls of a communicator, one file a family, from checked arguments to the engine."""
