"""What other software wrote, in; what other software reads, out.

Imports `models` only. Tensors come and go one at a time: readers give lazy
arrays, writers ask for them, and the caller places them on devices.
"""
