"""Which sequence computes what in the next step: pure Python, no llama.cpp, no I/O."""
