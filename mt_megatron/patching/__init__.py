"""The patch engine: declared changes to installed code, checked first, applied whole, undone exactly.

spec                 a patch: target, kind, reason, body
source               the installed source of a target, found without importing it
digest               digest of that source, its cache, the lines that drifted
records              files that ship with the package, as compressed JSON
plan                 selection, order and checks, before anything is changed
prior_changes        targets that other code changed before
engine               carries a plan out, at once and at later imports; takes it back
dataclass_fields     the kind ``fields``: more keyword-only fields of a dataclass
scoped               the kind ``rebind``: what some modules mean by a name
served               the kind ``module``: modules that cannot be imported by themselves
scope                which modules a redirection reaches
hooks                calls back when a watched module was executed
importlib_bootstrap  import statements that answer with a view
rebind               all holders of an original, by identity
referrers            objects that refer to another one, from the collector
places               where a value can be held, read and written back
journal              what was written where
report               what a plan did, frozen
in_force             features whose patches are in force
"""
