"""``python -m pt2qa.cli``."""

from pt2qa.cli import main

main()
