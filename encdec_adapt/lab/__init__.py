"""Studies: pages of arms and claims, their stages, workers and reports.

`pages` holds the dataclasses of a page, and imports nothing heavy. `variances`
and `verdicts` compute statistics of arms over seeds. This folder must not
import the commands: `encdec_adapt.study` passes them. The library does not
import this folder.
"""
