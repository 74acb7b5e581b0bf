"""Command line of linattn, one file per command."""
