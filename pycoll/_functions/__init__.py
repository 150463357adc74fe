"""Functions on ranks: `pycoll.run`, and what Ray and Dask have in common."""
