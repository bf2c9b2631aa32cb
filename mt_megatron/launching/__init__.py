"""Running other people's scripts: the choice of a backend, carried into a process and its children.

``choice`` is what travels in the environment, ``startup`` the folder whose ``sitecustomize`` reads
it in every new interpreter, ``activation`` what happens there, ``script`` what can be run.
"""
