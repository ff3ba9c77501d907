"""The same comparison on the kernels that ship."""
