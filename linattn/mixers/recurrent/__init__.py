"""Classical recurrent networks."""

FAMILY = "recurrent networks"
