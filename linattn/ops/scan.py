"""Public doors of the elementwise recurrences: ``diagonal_scan`` and ``running_max``. (Written next.)"""
