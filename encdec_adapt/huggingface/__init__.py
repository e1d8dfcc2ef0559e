"""Reads and writes Hugging Face model folders: config.json and safetensors.

Must import nothing above `models`. Tensors are lazy: readers return lazy
arrays, writers call a function per array, and the caller places arrays on
devices. README.md lists the supported families.
"""
