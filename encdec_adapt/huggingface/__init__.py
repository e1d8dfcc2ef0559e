"""Model folders of Hugging Face: config.json and safetensors, in and out.

Imports `models`, nothing above it. Tensors are read and written lazily:
readers return lazy arrays, writers call a function for each array, and the
caller places arrays on devices. README.md has the supported families.
"""
