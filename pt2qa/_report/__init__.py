"""What all reports share: columns, files, tables, differences, gates and pages.  Does not import torch."""
