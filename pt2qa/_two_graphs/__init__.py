"""Any two graphs of one model, value by value: what ``compare_graphs`` compares, and its report."""
