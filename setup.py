"""Builds the C helper of shared-memory channels where a compiler is found; without one, it is left out.

Everything else stands in pyproject.toml. The helper is a plain shared library, loaded with ctypes: it needs
no headers of Python. ``optional``: an error of the compiler is a warning, and the installation goes on.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mt_megatron.comm.shared_memory._ring",
            sources=["mt_megatron/comm/shared_memory/ring.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
