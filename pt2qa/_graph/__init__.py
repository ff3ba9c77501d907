"""What pt2qa knows of fx graphs: handles, names, and which outputs agree."""
