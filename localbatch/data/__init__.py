"""The data that every layer speaks: requests, completions, settings, errors. Knows nothing else."""
