"""Studies: pages of arms and claims, their stages, workers and reports.

`pages` holds the data classes that a page is made of, and imports nothing
heavy. `variances`, `verdicts` and `crossings` are statistics of arms over
seeds. This folder must not import the commands: `encdec_adapt.study` passes
them. The library does not import it.
"""
