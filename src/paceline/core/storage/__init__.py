"""Files by path or URL, for checkpoints and checked datasets: a local disk or any fsspec file system."""
