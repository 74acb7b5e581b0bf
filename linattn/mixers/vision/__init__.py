"""Linear attention for images."""

FAMILY = "linear attention of images"
