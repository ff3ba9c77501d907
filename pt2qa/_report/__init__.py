"""What all reports share: columns, files, tables, differences, gates and pages.  Free of torch."""
