"""The `tlt` command. Each command lives in its own module and is imported when it runs."""
