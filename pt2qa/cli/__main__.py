"""``python -m pt2qa.cli``."""

from pt2qa.cli import main

if __name__ == "__main__":
    main()
