"""One converted graph on several runtimes: where one differs from the rest, its kernel is at fault."""
