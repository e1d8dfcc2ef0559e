"""Studies: pages of arms and claims, their stages, and the workers.

`pages` holds the data classes that a page is made of, and imports nothing
heavy. The room must not import the commands: `encdec_adapt.study` passes them.
"""
