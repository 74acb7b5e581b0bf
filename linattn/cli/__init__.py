"""The command line, one file per door."""
