"""Small faults, put into the library one at a time: which of them does no test notice?  ``make mutants``."""
