"""Recurrent networks of the classical kind."""

FAMILY = "recurrent networks"
