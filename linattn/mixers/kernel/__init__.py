"""Linear attention by feature maps, without decay."""

FAMILY = "kernels"
