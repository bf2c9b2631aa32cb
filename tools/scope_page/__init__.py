"""MegaScope's live page: its source (Svelte) and what builds it. The build lies in the package.

build  npm, vite, and the digest of the source; python -m tools.scope_page.build
"""
