"""Linear attention of images."""

FAMILY = "linear attention of images"
