"""What every layer uses: lazy imports, settings of the environment, errors at the public edge."""
