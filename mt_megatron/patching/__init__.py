"""The patch engine: declared changes to installed code, checked first, applied whole, undone exactly.

What is declared            spec
What is installed           source, digest, cache, drift
What will be done           plan, checks, signatures
Doing it                    engine, kinds, scoped; hooks for modules that are imported later
Who else has the original   rebind, referrers, imported, exchanging
Undoing it                  places, journal
What was done               report
"""
