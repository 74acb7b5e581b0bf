"""Functions that the tests' workers run."""

import os
import time


def add(a, b):
    return a + b


def refuse():
    raise RuntimeError("not on this card")


def die():
    os._exit(7)


def sleep():
    time.sleep(60)


def place():
    return os.getpid(), os.environ.get("LINATTN_TEST_PLACE")
