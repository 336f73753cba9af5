"""From an input file to an output file: rows in, records out, progress between."""
