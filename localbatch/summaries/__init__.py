"""A folder of documents in, a summary of each out."""
