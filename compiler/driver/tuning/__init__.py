"""`llmc tune`: which knobs are the fastest for the kernels of one model on this machine.

model_kernels.py lists the kernels, operands.py makes something to run them on, machine.py compiles and times them,
search.py tries knobs, database.py keeps what was found; tune.py puts them together.
"""
