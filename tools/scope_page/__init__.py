"""MegaScope's live page: its source (Svelte) and what builds and shows it. The build lies in the package.

build      npm, vite, and the digest of the source; python -m tools.scope_page.build
synthetic  a recording made of formulas, for looking at the page and for its tests
show       serve the page on the synthetic recording, or on a run; python -m tools.scope_page.show
"""
