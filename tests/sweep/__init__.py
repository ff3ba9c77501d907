"""Every kind of op on the backend's kernels, at several scales: see :mod:`tests.sweep.__main__`."""
