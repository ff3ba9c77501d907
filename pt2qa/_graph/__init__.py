"""What pt2qa knows about fx graphs: handles, names, and which outputs agree."""
