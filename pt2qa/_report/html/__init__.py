"""Reports as one HTML page that needs no network.  Does not import torch."""

from pt2qa._report.html.page import html_page, write_html

__all__ = ["html_page", "write_html"]
